package raftconf

// Position identifies an entry of a group: raft guarantees that two entries with the same index and term are equal.
type Position struct{ Index, Term uint64 }
