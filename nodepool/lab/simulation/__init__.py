"""Run the daemons in one operating system thread over virtual time.

Threads become greenlets, and a seed decides which one runs next, so that a run can be repeated
exactly. Nothing in the daemons knows about it: only the lowest layer of the standard library is
replaced. Needs the extra ``simulate`` (greenlet).

====================  =====================================================================
:mod:`.kernel`        tasks, simulated processes, the scheduler and the clock
:mod:`.sync`          locks and threads of the standard library, on top of the kernel
:mod:`.network`       sockets, pipes and ``poll``; latency, cuts and partitions
:mod:`.install`       puts them in place of the real ones
:mod:`.zookeeper`     the embedded ZooKeeper server on the simulated network
====================  =====================================================================
"""
