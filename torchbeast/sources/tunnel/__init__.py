# SPDX-License-Identifier: Apache-2.0
"""Lets hosts of environment servers dial in to the learner, which cannot reach them.

    servers at Unix sockets <-- dialler.py, on the host
                                     || TCP, TLS
    ActorPool --> Unix sockets --> door.py, on the learner's machine

Between the Unix sockets bytes are only relayed, so servers and learner do what they do on one
machine.
"""
