// Package consensus runs many raft groups on one host. A Host has one durable log for all of its groups, exchanges
// envelopes with the hosts of the other members, and drives one StateMachine per group. It is built on
// go.etcd.io/raft/v3. It handles bytes only: it does not know what a proposal means, how envelopes travel, or how the
// transport authenticates a sender.
//
// This text is a tutorial for readers who know raft as etcd uses it. It follows the path of a write and of a read and
// names the file for each step.
//
// # Groups and hosts
//
// A Group (group.go) is one raft group on this member: a raft.RawNode, its log and its state machine. A Host (host.go)
// is the member: its ID is the raft ID in every group. Host and Group have no goroutine, no clock and no random source
// of their own. Tick, Step, Propose and ReadIndex queue work. Process (process.go) does the work and calls the
// callbacks. So a simulation drives several hosts from one goroutine and replays them exactly. raft draws its election
// timeouts from crypto/rand.Reader, which the simulation replaces.
//
// A Runner (runner.go, threads.go) drives a Host in production and has blocking methods that are safe for concurrent
// use. It has one goroutine for the Host, one for the log and one per group for the state machine.
//
// # A write
//
//  1. Group.Propose (propose.go) queues the proposal. Process passes the queue to raft as one message. In a group with
//     GroupOptions.Forward, proposals without an ID that are queued in the same tick share one entry, a batch (batch.go).
//  2. raft runs with AsyncStorageWrites: its Ready contains messages to other members, to the log and to the state machine.
//     Host.take (write.go) sends a leader's MsgApp at once, so the disks of leader and followers work at the same time.
//  3. The entries, votes and truncations of all groups go into one batch of the log (package raftlog), which is made
//     durable with one fsync. Messages that promise durability (votes, vote requests, append acknowledgements) are sent
//     only after the fsync. While the log's goroutine writes, the next batch is collected.
//  4. Committed entries are a job for the state machine (apply.go), on the group's own goroutine, so a slow state machine
//     delays its own group only. The state machine does not sync. When it has applied the entry, the callback of the
//     proposal gets the state machine's answer.
//  5. When the log has become long, the state machine is asked to flush (StateMachine.Flush), and the log is truncated up
//     to what has been flushed, except for a tail that is kept for slow followers (Group.trim).
//
// No fsync is made for the commit index alone. It is stored with the next entries. After a restart it is at least the
// state machine's position, because only committed entries are applied. A membership change is the exception
// (members.go).
//
// # A linearizable read
//
// Group.ReadIndex (read.go) uses raft's ReadOnlySafe mode: the leader confirms by heartbeats that it still leads. One
// request is under way at a time; reads that arrive meanwhile share the next one. The callback is called when the state
// machine has applied the confirmed index. Reads work on every member. There are no lease reads.
//
// # Forwarding
//
// Without GroupOptions.Forward a member that does not lead refuses a proposal with a NotLeaderError. With it, the
// member sends the proposal to the leader and answers it when it applies the entry itself (forward.go). The forwarded
// envelope names a term, and the leader appends it in that term at most once. So the member knows when a proposal was
// certainly not appended and may be sent again. If it does not know, the result is ErrUncertain, and a retry must carry
// the same ID.
//
// # Snapshots
//
// A member that needs entries that were truncated receives a checkpoint of the state machine: files, which the
// transport sends together with raft's MsgSnap (snapshot.go). The receiver stores in the log that the installation has
// begun, lets the state machine install the files, and then makes the log begin at the snapshot. After a crash in
// between, AddGroup completes or drops the installation.
//
// # Data-directory IDs
//
// A member that lost its disk has forgotten its votes and acknowledgements, and must not vote again. Each data
// directory has a random ID, and each member accepts messages of another member from one directory only. A member with
// an empty directory takes part only after every other member has confirmed that it knows no earlier directory
// (dirid.go); otherwise the host stops with a WipedError, and the member must be replaced.
//
// # Membership changes
//
// ChangeMembers (members.go) adds learners, promotes learners and removes members, by joint consensus if the change is
// larger than one member. A change that adds a member names its data-directory ID. validate.go refuses changes that
// would risk the quorum. The first configuration is Options.Members, the same on all members. A member that joins later
// starts with Options.Join, an empty log and no configuration. Logs begin after entry 1, so a joining member always
// needs a snapshot, and the snapshot has the membership.
//
// # Failures
//
//   - A failed write of the log or of a state machine stops the host, because what the disk holds is unknown then.
//     All pending calls fail: those that were not proposed with ErrStopped or the cause, the others with ErrUncertain.
//   - A leader whose log needs longer than Options.StallTicks for a write transfers leadership. PreVote and CheckQuorum
//     are on.
//   - An entry or a message of an unknown version is never interpreted: an entry stops the host, a message is dropped.
//
// # Packages
//
// raftlog stores the logs, message defines what members send to each other, raftconf has the values that both contain.
// None of the three knows a Host or a Group.
package consensus
