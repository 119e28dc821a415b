// Package snapfile writes and reads etcd's snapshot files: a bbolt database as the server of etcd 3.7 keeps it, followed
// by its SHA-256. What it writes, `etcdutl snapshot status` and `restore` take, and an etcd started from the restore
// serves the same keys with their revisions, versions and leases, and the same users and roles.
//
// It must not know our engine: what is to be written comes in as Contents, in etcd's own types.
//
// # Choices
//
//   - A file holds the live state at one revision, and says that everything before was compacted. Reads and watches of
//     older revisions are answered as compacted by whoever restores it; all revision numbers stay, and go on from there.
//   - When the last revision only deleted, no live key has it. Then a tombstone of a key that does not exist stands for
//     it, so that `etcdutl snapshot status` and `restore --bump-revision` see the right revision.
//   - No alarms are written: they are about the quota of members that the restored cluster does not have.
//   - Keys come in any order and bbolt wants them in the order of revisions: they are sorted in files. So writing takes a
//     bounded amount of memory, and room on disk for the data twice. The files have no name while they are written, so
//     nothing is left of them, however the process ends.
//   - Reading gives the latest live state in the order of the keys' creation, which is what recipes for locks and
//     elections go by. The whole file is checked before the first key is given out.
package snapfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/protowire"
)

// StorageVersion is what the files are of: etcd's version of the format.
const StorageVersion = "3.7.0"

// Contents is what a file is to hold.
type Contents struct {
	Revision int64 // the keyspace's; at least that of every key

	// Keys are the live keys. Whoever yields may use a key and its bytes again afterwards. An error ends the writing.
	Keys iter.Seq2[*mvccpb.KeyValue, error]

	// Leases may lack some that keys have: those ended after the keys were read, and are written with a TTL of a second.
	Leases []Lease
	Auth   Auth

	// Of the raft group that the snapshot is taken from. etcdutl replaces all of it.
	Index, Term uint64
	Members     []Member
}

// Lease is a lease. Its keys are those that say so.
type Lease struct {
	ID        int64
	TTL       int64 // seconds, as granted
	Remaining int64 // seconds left; 0: as granted
}

// Auth is etcd's Auth.
type Auth struct {
	Enabled  bool
	Revision uint64
	Users    []*authpb.User // with their passwords' hashes
	Roles    []*authpb.Role
}

// Member is a member of the raft group.
type Member struct {
	ID         uint64
	Name       string
	PeerURLs   []string
	ClientURLs []string
	Learner    bool
}

// The buckets of etcd's database.
var (
	bucketKey            = []byte("key")
	bucketMeta           = []byte("meta")
	bucketLease          = []byte("lease")
	bucketAlarm          = []byte("alarm")
	bucketCluster        = []byte("cluster")
	bucketMembers        = []byte("members")
	bucketMembersRemoved = []byte("members_removed")
	bucketAuth           = []byte("auth")
	bucketAuthUsers      = []byte("authUsers")
	bucketAuthRoles      = []byte("authRoles")
)

// The keys of the buckets meta, auth and cluster.
var (
	metaIndex            = []byte("consistent_index")
	metaTerm             = []byte("term")
	metaConfState        = []byte("confState")
	metaStorageVersion   = []byte("storageVersion")
	metaScheduledCompact = []byte("scheduledCompactRev")
	metaFinishedCompact  = []byte("finishedCompactRev")
	authEnabled          = []byte("authEnabled")
	authRevision         = []byte("authRevision")
	clusterVersion       = []byte("clusterVersion")
)

// errMalformed is of a revision or a lease that cannot be read.
var errMalformed = errors.New("malformed")

// A revision is a key of the bucket key: the revision, an underscore, the place among the revision's changes; for a
// delete also a t.
const (
	revisionBytes  = 8 + 1 + 8
	tombstoneBytes = revisionBytes + 1
	tombstoneMark  = 't'
)

func appendRevision(dst []byte, main, sub int64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(main))
	dst = append(dst, '_')
	return binary.BigEndian.AppendUint64(dst, uint64(sub))
}

func splitRevision(b []byte) (main, sub int64, tombstone bool, err error) {
	tombstone = len(b) == tombstoneBytes && b[revisionBytes] == tombstoneMark
	if len(b) != revisionBytes && !tombstone || b[8] != '_' {
		return 0, 0, false, fmt.Errorf("revision %x: %w", b, errMalformed)
	}
	main, sub = int64(binary.BigEndian.Uint64(b)), int64(binary.BigEndian.Uint64(b[9:]))
	if main < 0 || sub < 0 {
		return 0, 0, false, fmt.Errorf("revision %x: %w", b, errMalformed)
	}
	return main, sub, tombstone, nil
}

// A lease in the bucket lease is etcd's leasepb.Lease, which is not in its API: its fields.
const (
	leaseID        protowire.Number = 1
	leaseTTL       protowire.Number = 2
	leaseRemaining protowire.Number = 3
)

func (l Lease) encode() []byte {
	var b []byte
	for i, v := range []int64{l.ID, l.TTL, l.Remaining} {
		if v != 0 {
			b = protowire.AppendTag(b, leaseID+protowire.Number(i), protowire.VarintType)
			b = protowire.AppendVarint(b, uint64(v))
		}
	}
	return b
}

func decodeLease(b []byte) (l Lease, err error) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return Lease{}, fmt.Errorf("lease: %w", errMalformed)
		}
		b = b[n:]
		var v uint64
		if kind == protowire.VarintType {
			v, n = protowire.ConsumeVarint(b)
		} else {
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return Lease{}, fmt.Errorf("lease: %w", errMalformed)
		}
		b = b[n:]
		switch number {
		case leaseID:
			l.ID = int64(v)
		case leaseTTL:
			l.TTL = int64(v)
		case leaseRemaining:
			l.Remaining = int64(v)
		}
	}
	return l, nil
}

func fixed64(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }
