// Package message defines what the members of a cluster send to each other, and its encoding. An Envelope is the unit
// that a transport carries: a raft message of one group, the coalesced heartbeats of many groups, forwarded proposals and
// their refusal, or a request or response about data-directory IDs.
//
// The package also defines the data of a raft entry (batch.go): one proposal with its ID, or a batch of proposals without
// IDs, compressed with S2 if that makes the batch smaller. Entries are stored as they are sent, so this is a format on
// disk, too.
//
// # Decisions
//
//   - Envelopes, entries and snapshot data each begin with a version byte. An unknown version is an error.
//     testdata/envelopes holds one encoded envelope of each kind.
//   - Parse checks the encoding. Check verifies what raft trusts without checking, such as the order of entries, because
//     raft panics on a violation. Neither checks who sent an envelope: the transport authenticates the sender.
//   - Heartbeats have an encoding of their own, because a host sends those of all groups to another member as one envelope.
//
// The package does not depend on hosts, groups or the log, and does no I/O.
package message
