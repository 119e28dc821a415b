// Package command defines the commands that write to an mvcc keyspace, and their encoding in the raft log. It has no
// state and does no I/O. Package mvcc applies what this package decodes.
//
// There are three kinds of commands:
//
//   - A Txn is decided before it is proposed. Its Guards name the mod revisions that the proposer read. To apply it
//     means to compare them with the current ones and to write its Ops, or to report a conflict. The platform's own
//     records are written this way.
//   - A Program is decided when it is applied, like etcd's Txn: a list of Steps (range, put, delete, compare and
//     branch, lease grant and revoke) of which each sees the writes of those before it. The key-value service uses it.
//   - A compaction (EncodeCompact) raises the compact revision.
//
// EncodeTxn, EncodeProgram and EncodeCompact check a command against the limits below and return the Data of a Command.
// Decoder reads it back and refuses what these functions would not have made, since a command that one member refuses
// and another one applies would let their states differ.
//
// The package also defines what commands and reads have in common: KV and Meta (a key with its revisions), RangeOptions
// and RangeResult, the notation of ranges (InRange, PrefixEnd), the errors, and FieldDecoder, with which mvcc decodes
// the entries of its database.
//
// # Key ranges
//
// A range is written as in etcd: [Key, End). Without an End it is Key alone; the End {0} means all keys from Key on.
// The empty Key with a non-empty End begins at the first key.
//
// # Formats
//
// The first byte of an encoded command is the format, 1, the second one the Kind. Numbers are unsigned varints, byte
// strings are preceded by their length. Encoded commands are stored in logs, and results with proposal IDs in the
// state: a change needs a new format or kind.
package command
