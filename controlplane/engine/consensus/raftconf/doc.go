// Package raftconf holds positions in a raft log and the membership of a raft group.
package raftconf
