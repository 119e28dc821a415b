// Package keyindex is mvcc's index of live keys: a B-tree in memory that maps each live key to the metadata of its
// newest version. It is optional (mvcc's Options.KeyIndex) and is never written to disk.
//
// It serves two purposes. A put finds the version that it replaces without reading the disk; and the number of keys in
// a range, with their highest mod revision, takes O(log n): each node stores both for all keys below it.
//
// Unlike etcd's treeIndex, it holds only the newest version of a key. History is read from Pebble, where the versions
// of a key lie side by side.
//
// # Choices
//
//   - Copy on write: a copy of the Index struct is a snapshot that never changes, once Freeze was called on the
//     original. The writer then copies a node before it first changes it. So readers need no lock.
//   - Leaves contain no pointers: the keys of a leaf are one byte string, and an Entry has 20 bytes. A key costs its
//     length, 24 bytes and its share of the node, and the garbage collector has nothing to follow. A tree of interface
//     values or pointers, such as google/btree, needs an allocation for each key on top.
//   - An Entry that cannot hold everything (leases, huge numbers, large values that were not read at the start) is
//     partial: the caller then reads the version itself.
//
// The package does not depend on Pebble or the engine. An Index belongs to one goroutine.
package keyindex
