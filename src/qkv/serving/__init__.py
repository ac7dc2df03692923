"""HTTP server and notebook widget for the explorer, an interactive page that shows the views of `qkv.inspection`.

`Explorer` computes the responses of the API that `docs/explorer-api.md` specifies. `app` serves these responses
and the built page over HTTP on the loopback address. `notebook` shows the same page in Jupyter.
"""
