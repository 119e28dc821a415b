// Package mvcc is one ordered keyspace with a history: revisions, compare-and-swap transactions, etcd's transactions with
// branches and leases, ranges at any revision that is kept, watches from any revision that is kept, compaction. It is a deterministic state machine over Pebble: the
// same commands in the same order give the same state, the same results and the same events on every member. The
// platform's own records and the users' keys each live in an engine of this kind.
//
// It must not know where commands come from or what keys, values and named records mean: no raft, no users, no RPC, no
// clock. Time is what proposers stamped into transactions; who renews a lease, and when it ends, is not its affair.
//
// There are two kinds of transactions. A Txn was decided before it was proposed: what was read is in its guards, which are
// revisions only. A Program is decided when it is applied. Its answers are made only where they are Wanted; whether it is
// refused is the same everywhere.
//
// # Semantics
//
// They are etcd's. The empty keyspace is at revision 1, the first write makes revision 2. A transaction that changes
// something makes one revision; one that changes nothing makes none. A key has a create revision, a mod revision and a
// version, which counts from 1 and starts again after a delete. Compacting at revision R lets go of what only older
// revisions could see: reads and watches from R on stay exact, older ones answer a CompactedError.
//
// # Durability
//
// Pebble runs without a log of its own: the log of commands is the log. The applied index, the revision, the stamped
// time, the floor, the epoch, leases, sizes and the ids of proposals are in the same batch as the data they belong to, so
// after a crash the engine stands exactly between two commands, at or after the last Flush, and the log is replayed from
// Applied().
// Entries may be dropped from the log only below a Position that Flush returned.
//
// # Choices
//
//   - A key's versions lie side by side, newest first, and hold the values; what revisions changed is listed
//     without values, one list a batch: lists differ between members, what they say does not. A range is one scan, a point read one seek behind a bloom filter, and opening reads no index.
//   - Physical removal is not part of applying. EncodeCompact only moves the floor; Scrub removes in bounded pieces, at
//     its own pace on every member, what no permitted read can see. What has been removed already tells where it goes on.
//   - Compaction keeps all of the floor's own revision, with what it replaced, so a watch from the floor misses nothing.
//   - A snapshot that is open keeps its data, whatever is compacted meanwhile. Restore ends snapshots (ErrRestored).
//     Watchers live on: they read on from the restored history, or end with CompactedError when it begins later.
//   - A live watcher is not ended by a compaction that overtakes it while the events it misses are still in memory.
//   - One revision may put and delete a key, and more: etcd allows it across branches. Readers see the last, watchers all;
//     the values of the others are in the lists only. What an event replaced is what the key held before the revision.
//   - Branches are chosen by what the program found, not by what its steps write, as etcd does.
//   - A live key costs memory only with CountIndex. Counts of ranges are exact: from the index at a snapshot's own revision,
//     else by scanning. The index also spares a put the look at what it replaces.
//   - Leases and named records have no history. Records are kept with a snapshot; leases are always as of now.
//   - Sizes for quotas are logical: what was written less what Scrub removed, neither compressed nor rounded to files.
//   - Damaged data is found by checksums. Whoever reads it gets ErrCorrupt, Apply ends with it, Restore refuses it. Pebble
//     looks for a flipped bit first: such a read of a block of 16 KiB costs a third of a second.
//   - Close does not flush; a Flush before it shortens the next replay.
//   - While the disk refuses writes Pebble tries again and Apply goes on, until three memtables are full: then it waits.
//     Stats counts both. A disk that refuses Pebble's manifest ends the process, as Pebble would have it.
package mvcc
