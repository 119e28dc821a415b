// Package raftlog stores the raft logs of all groups of one host in one Pebble directory. An Engine is the directory. A
// Log is the log of one group in it, and implements raft.Storage.
//
// A caller adds the writes of any number of groups to one batch of the engine and then makes the batch durable: one fsync
// for all groups. A write is visible through the Log at once, before the batch is durable; the caller must not send
// acknowledgements or votes before Engine.Write or Engine.Commit has returned.
//
// # What is stored
//
// Per group: the entries, raft's HardState (term, vote, commit index), the position where the log begins with the
// membership as of there, and, during the installation of a snapshot, a marker. Per directory: its random ID
// (Directory) and the directory IDs of the other members. The keys are listed in layout.go. Layout 1, whose logs began
// without a membership, is rewritten when a directory is opened; another layout is refused.
//
// # Decisions
//
//   - No fsync is made for the commit index alone. It is stored with the next entries or vote. After a restart it is
//     at least what the state machine has applied, because the state machine applies committed entries only.
//   - Open reads the whole log once, so that a missing entry is found at the start and not when a follower needs it. Only
//     membership changes stay in memory, and a cache of the newest entries (cache.go).
//   - A bit error in the middle of Pebble's write-ahead log is ErrDamaged; a torn record at the end was never
//     acknowledged and is dropped.
//   - After a failed write the engine is unusable: a failed fsync cannot be repeated, and what the disk holds is unknown.
//   - On the operating system's file system, Pebble's log files are preallocated (preallocate.go), so that an fsync does
//     not wait for the file system's journal.
//
// The package does not depend on raft.RawNode, a state machine or a network, and does not decide when a log is
// truncated.
package raftlog
