"""Processes of a run on one host: started, watched, waited for, ended; it imports nothing else of slime."""
