"""HTTP server and notebook widget of the explorer, an interactive page for the views of `qkv.inspection`.

`Explorer` computes the responses of the API that `docs/explorer-api.md` specifies. `app` serves them over HTTP on the
loopback address together with the built page, and `notebook` shows the same page in Jupyter.
"""
