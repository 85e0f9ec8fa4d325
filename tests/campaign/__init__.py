"""A fault campaign: forebay is killed, starved, damaged, raced and lied to, and an oracle judges what it does then.

    python -m tests.campaign --seed 7 --minutes 2

After every fault the oracle asks: does a reader get exactly the right rows or a clear error; does `verify` find the
damage; does `repair` restore it or say why not; does the same command finish with the same rows; did anything outside
the cache change; was there a traceback, a hang, a death by a signal, more than 1 GiB of memory?

trial.py      one forked process per question, and how it ended
syscalls.py   kills and errors at single system calls (ptrace)
worlds.py     small caches whose rows are known
damage.py     every kind of damage to every kind of file
hostile.py    a corpus of crafted caches: headers, offsets, generations, plans, names, links, special files, bombs
faults.py     the classes of faults and how each is judged
"""
