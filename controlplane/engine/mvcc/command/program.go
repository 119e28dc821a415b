package command

import "slices"

// Program is the counterpart of etcd's Txn: steps that read and write when the command is applied. All writes of a
// program make one revision. Each step sees the writes of the steps before it, except that the compares of all
// branches, nested ones included, see the keys as they were before the program (as etcd's compareToPath does).
//
// The first step that cannot be carried out, in any branch that was taken, refuses the whole program: nothing is
// written. Several steps may change the same key. A service that promises etcd's ErrDuplicateKey has to check for it
// before it proposes the program.
type Program struct {
	// Epoch, unless 0, is the epoch of the named records (Snapshot.Epoch) at which the proposer read them. If the
	// records have changed since, the program is refused with RefusedEpoch. So what the proposer checked against the
	// records still holds when the program is applied.
	Epoch int64
	Steps []Step
}

// StepKind is the kind of a Step.
type StepKind uint8

// The numbers of the kinds are stored in the raft log and must never change.
const (
	StepRange        StepKind = 1 // read [Key, End) with the options Range
	StepPut          StepKind = 2 // write Value at Key
	StepDelete       StepKind = 3 // remove [Key, End)
	StepBranch       StepKind = 4 // run Then if all compares of If hold, otherwise Else
	StepGrant        StepKind = 5 // create lease Lease, not 0, with TTL; RefusedLeaseExists if it exists
	StepRevoke       StepKind = 6 // remove lease Lease and its keys; RefusedLeaseNotFound if it does not exist
	StepSetRecord    StepKind = 7 // write Value as the named record Key; increments the epoch
	StepDeleteRecord StepKind = 8 // remove the named record Key; increments the epoch if it existed
)

// Step is one operation of a Program.
//
// Named records are a few small values beside the keyspace, such as users, roles and alarms. They have no history and
// are not seen by ranges, watches and hashes. A service that checks a request against them proposes the request with
// the epoch of the records that it read.
type Step struct {
	Kind  StepKind
	Key   []byte
	End   []byte
	Value []byte // value to write; StepRevoke: if set, DigestKeys of the lease's keys, RefusedEpoch if they differ

	// Lease is the ID of a lease. A StepPut attaches the key to this lease, or to none if Lease is 0; the program is
	// refused with RefusedLeaseNotFound if the lease does not exist. A StepGrant creates the lease and a StepRevoke
	// removes it; for them Lease must not be 0.
	Lease int64
	TTL   int64 // StepGrant: time to live of the lease, seconds

	PrevKV      bool // StepPut, StepDelete: return the versions that were replaced
	IgnoreValue bool // StepPut: leave the value as it is; RefusedKeyNotFound if there is no key
	IgnoreLease bool // StepPut: leave the lease as it is; RefusedKeyNotFound if there is no key

	// Range holds the options of a StepRange. Its Key and End are not used; those of the step are. A Revision below the
	// compact revision is refused with RefusedCompacted. A Revision above the one before the program is refused with
	// RefusedFuture.
	Range RangeOptions

	If         []Compare
	Then, Else []Step
}

// ReadsRevision reports whether a step, in any branch, has a Range.Revision, that is, reads at a given revision. Such a
// program must not share its log entry with other commands; see Command.
func ReadsRevision(steps []Step) bool {
	return slices.ContainsFunc(steps, func(s Step) bool {
		return s.Range.Revision > 0 || ReadsRevision(s.Then) || ReadsRevision(s.Else)
	})
}

// CompareTarget is the property of a key that a Compare compares.
type CompareTarget uint8

// The numbers of the targets are stored in the raft log and must never change.
const (
	CompareVersion CompareTarget = 0
	CompareCreate  CompareTarget = 1
	CompareMod     CompareTarget = 2
	CompareValue   CompareTarget = 3
	CompareLease   CompareTarget = 4
)

// CompareRelation is the relation that must hold between the key's property and the operand of the Compare.
type CompareRelation uint8

// The numbers of the relations are stored in the raft log and must never change.
const (
	CompareEqual    CompareRelation = 0
	CompareGreater  CompareRelation = 1
	CompareLess     CompareRelation = 2
	CompareNotEqual CompareRelation = 3
)

// Compare is a condition on Key, or on every key of [Key, End). For a missing key the version, revisions and lease are
// 0, and a comparison of the value never holds. An empty range is compared like a missing key.
type Compare struct {
	Key, End []byte
	Target   CompareTarget
	Relation CompareRelation
	Number   int64  // operand for all targets but CompareValue
	Value    []byte // operand for CompareValue
}

// StepResult is the result of one step. Result.Steps has one for each step that was carried out.
type StepResult struct {
	Kind  StepKind
	Range RangeResult // StepRange: what was read; StepPut and StepDelete with PrevKV: what was replaced, in KVs
	Count int64       // StepDelete, StepRevoke: number of removed keys

	Succeeded bool // StepBranch: all compares held
	Steps     []StepResult
}

// Lease is a lease to which keys can be attached. The keyspace only stores leases; the service that uses the keyspace
// renews them, and revokes them when they expire.
type Lease struct {
	ID  int64
	TTL int64 // time to live in seconds, as granted
}
