"""The explorer's server: every view of `qkv.inspection` over HTTP, on the loopback address, and the built page.

`docs/explorer-api.md` is the contract. `Explorer` answers; `app` is its HTTP, `widget` a notebook's way to it.
"""
