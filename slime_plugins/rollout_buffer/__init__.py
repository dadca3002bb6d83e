"""Generation in a process of its own: a server that runs generators and buffers their groups, and its client."""
