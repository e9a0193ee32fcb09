"""Starting the processes of a job, supervising them, and finding one's place among them.

The launcher never imports a framework, and a worker needs nothing of it but environment variables.
"""
