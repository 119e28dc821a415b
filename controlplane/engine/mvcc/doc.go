// Package mvcc is a multi-version key-value store: a deterministic state machine over Pebble with etcd's semantics. The
// same commands in the same order give the same state, results and events on every member. The platform's own records
// and the users' keys each live in an Engine of their own.
//
// The package does not depend on where commands come from or what keys mean: it has no raft, users, RPC or clock. Time
// is what proposers stamped into transactions. Leases are stored here, but renewed and expired by the service above.
//
// # Layers
//
//   - command: the commands (Txn, Program, compaction), their encoding, and the types that reads share with them.
//   - keyindex: the index of live keys in memory.
//   - watch: the delivery of events to watchers.
//   - mvcc: the Engine, which applies commands to Pebble and serves reads. It imports the other three; they do not
//     import it.
//
// Types that callers need for every read (KV, RangeOptions, RangeResult, CompactedError, and the errors of reads) also
// have names in this package, since dozens of call sites use them beside Engine and Snapshot. Everything else is
// used from its own package.
//
// # Revisions
//
// The empty keyspace is at revision 1; the first write makes revision 2. A command that changes keys makes exactly one
// revision; one that changes no key makes none. A key has a create revision, a mod revision and a version, which counts
// puts from 1 and starts again after a delete.
//
// Apply takes committed log entries in order. Each command is decoded (command.Decoder) and applied: transact for a
// Txn, execute for a Program. Both collect changes and then write them to one Pebble batch for the whole call: for each
// change a version of the key and an entry in the change log; for the batch the new state with the applied index.
// Commands of the batch see the writes of earlier ones in an overlay, before Pebble has them. After the commit, publish
// shows the new view to readers, and the hub announces the changes to watchers.
//
// # Key index
//
// To apply a put, the engine needs the metadata of the version that it replaces. With Options.KeyIndex this comes from
// memory (package keyindex), otherwise from Pebble. etcd keeps an index of all revisions of all keys; here it is
// optional and holds only the newest version of live keys, since Pebble finds old versions itself. It is built in the
// background after Open and Restore, and also makes counts of ranges fast.
//
// # Value store
//
// One Pebble database holds all tables, told apart by the first byte of the key (key.go). The versions of a key lie
// side by side, newest first, with their values: a range at any revision is one scan, a read of one key is one seek
// behind a bloom filter. The change log, under increasing revisions, lists which keys each revision changed, without
// the values.
//
// Pebble runs without a write-ahead log, since the raft log has the same commands. The applied index is in the same
// batch as the data, so after a crash the engine is exactly between two commands, at or after the last Flush, and the
// owner replays the raft log from Applied. Log entries may be deleted only below a Position that Flush returned.
//
// # Watch
//
// Watch starts a Watcher at any revision that can be read, or in the future. Recent events come from memory, older ones
// from the change log, whose values are looked up in the versions (history.go). See package watch.
//
// # Compaction
//
// A compaction at revision R makes R the compact revision: reads and watches from R on stay exact, older ones fail with
// a CompactedError. Applying it only changes that number. The data is removed by Scrub, which each member calls in the
// background in small steps: it reads the change log up to R and deletes the versions that were replaced. The change
// log of R itself is kept, so that a watch from R misses nothing. Defragment then gives the space back at once.
//
// # Snapshots
//
// A Snapshot is the published view at one moment. It costs one small object; while it is open, Scrub keeps the data
// that it can read, whatever is compacted meanwhile. Checkpoint and Restore move the whole state: a checkpoint is a
// Pebble directory of hard links, Restore replaces the current one by it. Open snapshots then end with ErrRestored;
// watchers continue if the new history contains what they have seen.
//
// # Decisions
//
//   - A Txn is decided by its proposer: its guards contain the revisions that were read. A Program is decided when it
//     is applied. Results of a Program's steps are computed only where a caller waits (Command.WantSteps); whether it
//     is refused is the same on all members.
//   - A program may change a key several times in one revision, which etcd allows across branches. Readers see the last
//     change, watchers all of them; the values of the others are only in the change log.
//   - Branches see the keys as they were before the program, as in etcd.
//   - Change lists are made for each batch, and members may batch differently: the stored bytes differ between members,
//     their meaning does not. HashKV therefore hashes versions.
//   - When a compaction removes revisions that a watcher has not received, the watcher continues if their events are
//     still in memory.
//   - Leases and named records have no history. A snapshot has the records of its time, but the current leases.
//   - Sizes for quotas (Size) are logical: bytes written minus bytes that Scrub removed. They depend neither on
//     compression nor on file sizes.
//   - Damaged data is found by Pebble's checksums. The reader gets ErrCorrupt, Apply fails for good, Restore refuses
//     the checkpoint. A read of a damaged block of 16 KiB takes a third of a second, since Pebble searches for a
//     flipped bit.
//   - Close does not flush. A Flush before it shortens the next replay.
//   - While the disk refuses writes, Pebble retries and Apply continues until three memtables are full; then it waits.
//     Stats counts the errors and the waits. If Pebble cannot write its manifest, the process ends, as Pebble requires.
//   - The overlay of pending writes is a small hash table of our own. It keeps its memory from batch to batch and lists
//     its keys in order; cockroachdb/swiss would only replace its slots.
package mvcc
