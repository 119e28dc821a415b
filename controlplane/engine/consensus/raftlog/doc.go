// Package raftlog stores the logs of all raft groups of a host.
package raftlog
