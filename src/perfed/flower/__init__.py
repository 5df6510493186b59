"""A real federation: the same algorithms, carried between machines by Flower.

    protocol     what crosses, and the checks both sides make
    settings     the two configuration files, a coordinator's and a site's
    site         what a site does with a task, and what it keeps on its disk
    membership   who is there
    numbers      how sites evaluate their models
    server_networks  what the server knows of networks
    coordinator  what a round waits for
    codec        envelopes as Flower records
    server_app, client_app   what Flower starts
    initialise   ``perfed federation init``

Only the last four need Flower (``perfed[flower]``); nothing here knows an algorithm.
"""
