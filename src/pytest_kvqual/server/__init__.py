"""Start an arm of a study, talk to it, and end it: the life of one process tree."""
