"""The dashboard: pages over what runs write, while they run and afterwards.

    slime view DIR...                 serves every run in the directories (also `python -m slime.dashboard DIR...`)
    train.py ... --dashboard-port N   starts the same server next to a run

It only reads. It imports neither torch nor Ray, Megatron or SGLang, so a server without visitors stays small.

    address     the socket, the token and the lines that are printed
    runs        which runs there are, which files of samples each has, and what it is doing
    records     rollouts/*.parquet as tables and samples
    pages       the JSON behind each page
    app         routes, authorization, the server
    prometheus  what --prometheus-port starts: /metrics of a run
    static      the pages: plain ES modules
"""
