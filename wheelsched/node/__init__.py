"""Builds everything once and hands it around; the one face that `api` and `cli` talk to (`face.py`).

`build.py` wires store, log, replicas and dispatcher from the settings; `node.py` is the running node; `listing.py` merges the rows of
all groups into pages. `cluster.py` is the face of one node of several, `calls.py` what such nodes ask of each other, `remote_claims.py`
and `offers.py` how the jobs of all come to the workers of any. A node that stops drains first: new work is refused, long polls are
answered, what is in the log is applied.
"""

from wheelsched.node.build import open_node
from wheelsched.node.build_cluster import open_cluster_node
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.node import Node

__all__ = ["ClusterNode", "Node", "open_cluster_node", "open_node"]
