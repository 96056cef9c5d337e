import sys,time,logging
sys.path.insert(0,'/work/main')
import pytest
from tests.conftest import *
from tests.sshd import ssh_server
def test_x(zk_chroot, caplog):
    caplog.set_level(logging.DEBUG)
    from nodepool.launcher import NodePool
    from nodepool.zk.zookeeper import ZooKeeper, NodeRequest, REQUESTED
    with ssh_server() as s:
        cfg=zk_chroot.config({'labels':[{'name':'a'}],'providers':[{'name':'st','driver':'static','pools':[{'name':'main','nodes':[{'name':'127.0.0.1','labels':'a','connection-port':s.port,'username':'root','max-parallel-jobs':2}]}]}]})
        zk=ZooKeeper(zk_chroot.connect()); assert zk.wait_synced(10)
        pool=NodePool(None,cfg); t=time.time(); pool.start()
        wait_for(lambda: len(zk.getReadyNodesOfTypes(['a']).get('a',[]))==2)
        print('registered',time.time()-t)
        r=NodeRequest(); r.node_types=['a']; r.state=REQUESTED; r.requestor='x'
        t=time.time(); zk.storeNodeRequest(r)
        q=wait_for(lambda: (x:=zk.getCachedRequest(r.id)) and x.state=='fulfilled' and x)
        print('fulfilled',time.time()-t,q)
        n=zk.getNode(q.nodes[0]); zk.lockNode(n); n.state='used'; zk.storeNode(n); zk.deleteNodeRequest(r); t=time.time(); zk.unlockNode(n)
        wait_for(lambda: zk.getCachedNode(n.id) is None)
        print('gone',time.time()-t)
        wait_for(lambda: len(zk.getReadyNodesOfTypes(['a']).get('a',[]))==2)
        print('back',time.time()-t)
        pool.stop()
