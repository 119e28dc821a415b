// Package raftlog stores the raft logs of all groups of one host in one Pebble directory. An Engine is the store in
// that directory. A Log is the log of one group in it, and implements raft.Storage.
//
// A caller adds the writes of any number of groups to one batch of the engine, and then makes the batch durable with
// one fsync for all groups. Reads from a Log see a write at once, before the batch is durable. So the caller must not
// send acknowledgements or votes before Engine.Write or Engine.Commit has returned.
//
// # What is stored
//
// For each group: the entries, raft's HardState (term, vote, commit index), and a LogStart, which says where the log
// begins and what the membership is there. During the installation of a snapshot, also a marker, which says where the
// log will begin afterwards. For the directory: its random ID (Directory) and the directory IDs of the other members.
// The keys are listed in layout.go. A store of layout 1, in which a LogStart lacks the directory IDs of the members and
// the position of the state machine, is converted when it is opened. A store of an unknown layout is refused.
//
// # Decisions
//
//   - No fsync is made for the commit index alone. It is stored with the next entries or vote. After a restart the
//     commit index is at least what the state machine has applied, because the state machine applies committed entries
//     only.
//   - Open reads the whole log once, so that a missing entry is found at the start and not when a follower needs it.
//     Memory holds only the membership changes and a cache of the newest entries (cache.go).
//   - A bit error in the middle of Pebble's write-ahead log is ErrDamaged. A torn record at the end was never
//     acknowledged, so Pebble drops it.
//   - After a failed write the engine is unusable: a failed fsync cannot be repeated, and the content of the disk is
//     unknown.
//   - On the operating system's file system, Pebble's log files are preallocated (preallocate.go), so that an fsync
//     does not wait for the file system's journal.
//
// The package does not depend on raft.RawNode, a state machine or a network, and does not decide when a log is
// truncated.
package raftlog
