// Package raftconf holds the values that both the log and the messages of a raft group contain: a Position (index and
// term of an entry), the Membership as of an entry, and the LogStart, the position where a log begins.
//
// A Membership is raft's ConfState and two tables of data-directory IDs. DirIDs has the directory of each member that a
// membership change added; a message from another directory with the same member ID is dropped. Removed has the
// directories of removed members, so that they can be notified. The membership is computed from the log: the membership
// at the log's begin plus the membership changes (change.go) that follow.
//
// The encodings are part of formats on disk (raftlog) and on the wire (message) and must stay compatible. The package
// does no I/O.
package raftconf
