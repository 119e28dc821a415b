package command

import "slices"

// Program is etcd's transaction: steps that are decided when they are applied, not before. All its writes make one
// revision, and each step sees the writes of those before it; only the compares of branches, at all depths, see the keys as
// the program found them (etcd's compareToPath).
//
// A program is refused as a whole, with nothing written, by the first of its steps that cannot be carried out, which may
// lie in any branch that was taken. A step may change a key again that another one has changed: whoever promises etcd's
// ErrDuplicateKey checks that before.
type Program struct {
	// Epoch, unless 0, must be the keyspace's present epoch (RefusedEpoch otherwise): what was checked against the
	// records before the program was proposed still holds.
	Epoch int64
	Steps []Step
}

// StepKind says what a Step does.
type StepKind uint8

// The kinds are stored: their numbers never change.
const (
	StepRange        StepKind = 1 // read [Key, End) as Range says
	StepPut          StepKind = 2 // write Value at Key
	StepDelete       StepKind = 3 // remove [Key, End); no End: Key alone; End {0}: all from Key on
	StepBranch       StepKind = 4 // Then when all of If hold, else Else
	StepGrant        StepKind = 5 // make lease Lease, not 0, of TTL seconds; RefusedLeaseExists
	StepRevoke       StepKind = 6 // end lease Lease and remove its keys; RefusedLeaseNotFound
	StepSetRecord    StepKind = 7 // write Value as record Key; the epoch moves on
	StepDeleteRecord StepKind = 8 // remove record Key; the epoch moves on if it was there
)

// Step is one act of a Program.
//
// Records are a few small values beside the keyspace, without history and seen by no range, watch or hash: who may do
// what, alarms. Whoever checks a request against them proposes it with the epoch of what was read.
type Step struct {
	Kind  StepKind
	Key   []byte
	End   []byte
	Value []byte // StepRevoke: unless empty, the DigestKeys of all the lease's keys as they were checked (RefusedEpoch)

	Lease int64 // StepPut: attach the key, 0: to none (RefusedLeaseNotFound); StepGrant, StepRevoke: not 0
	TTL   int64 // StepGrant: seconds

	PrevKV      bool // StepPut, StepDelete: answer what was replaced
	IgnoreValue bool // StepPut: keep the value that is there (RefusedKeyNotFound)
	IgnoreLease bool // StepPut: keep the lease that is there (RefusedKeyNotFound)

	// Range says how StepRange reads; its Key and End are the step's. A Revision is read as of then: RefusedCompacted,
	// and RefusedFuture above the revision that the program found.
	Range RangeOptions

	If         []Compare
	Then, Else []Step
}

// ReadsRevision says whether a step, of any branch, reads as of a revision. A program of such steps must not share its
// index with others: see Command.
func ReadsRevision(steps []Step) bool {
	return slices.ContainsFunc(steps, func(s Step) bool {
		return s.Range.Revision > 0 || ReadsRevision(s.Then) || ReadsRevision(s.Else)
	})
}

// CompareTarget is what of a key a Compare looks at.
type CompareTarget uint8

// The targets are stored: their numbers never change.
const (
	CompareVersion CompareTarget = 0
	CompareCreate  CompareTarget = 1
	CompareMod     CompareTarget = 2
	CompareValue   CompareTarget = 3
	CompareLease   CompareTarget = 4
)

// CompareRelation is how it must stand to what the Compare gives.
type CompareRelation uint8

// The relations are stored: their numbers never change.
const (
	CompareEqual    CompareRelation = 0
	CompareGreater  CompareRelation = 1
	CompareLess     CompareRelation = 2
	CompareNotEqual CompareRelation = 3
)

// Compare holds when the relation does for Key, or for every key of [Key, End). A key that does not exist has version,
// revisions and lease 0; comparing its value never holds. A range without keys is compared like one that does not exist.
type Compare struct {
	Key, End []byte
	Target   CompareTarget
	Relation CompareRelation
	Number   int64  // for all targets but the value
	Value    []byte // for the value
}

// StepResult is what a step of a program found; Result.Steps has one for each that was carried out, on the member that
// wants it.
type StepResult struct {
	Kind  StepKind
	Range RangeResult // StepRange; StepPut with PrevKV and StepDelete with PrevKV: what was replaced, in KVs
	Count int64       // StepDelete, StepRevoke: keys that were removed

	Succeeded bool // StepBranch: If held
	Steps     []StepResult
}

// Lease is a lease of the keyspace. Who renews it, and when it ends, is not the keyspace's affair.
type Lease struct {
	ID  int64
	TTL int64 // seconds, as granted
}
