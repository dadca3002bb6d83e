"""What each agent is asked; `{problem}`, `{solutions}` (numbered) and `{count}` are filled in."""

SOLVER = "{problem}"

REWRITER = """{problem}

Here are {count} solutions of this problem by others. Some may be wrong.

{solutions}

Compare them, find their mistakes, and write one new and complete solution of the problem."""

SELECTOR = """{problem}

Here are {count} solutions of this problem.

{solutions}

Decide which one is right. The last line of your answer must be
"Judgment: IDX", where IDX is the number of the solution."""
