// Package snapfile writes and reads etcd's snapshot files: a bbolt database in the format of etcd 3.7, followed by its
// SHA-256. `etcdutl snapshot status` and `restore` accept the written files, and an etcd started from the restore
// serves the same keys with their revisions, versions and leases, and the same users and roles.
//
// The package must not depend on Trivet's engine: the caller passes Contents, in etcd's own types.
//
// # Decisions
//
//   - A file contains the live state at one revision, and marks all earlier revisions as compacted. After a restore,
//     reads and watches of older revisions fail as compacted. Revision numbers are kept, and continue from there.
//   - If the last revision only deleted keys, no live key has that revision. Then the file gets a tombstone of a
//     nonexistent key at that revision, so that `etcdutl snapshot status` and `restore --bump-revision` find the right
//     revision.
//   - Alarms are not written: they concern the quota of members that the restored cluster does not have.
//   - Keys arrive in any order, and bbolt needs them sorted by revision: an external sort uses temporary files. So
//     writing needs a bounded amount of memory, and disk space for twice the data. The files are unlinked while they
//     are written, so nothing remains of them, however the process ends.
//   - Reading returns the latest live state in the order of the keys' creation, on which recipes for locks and
//     elections rely. The whole file is checked before the first key is returned.
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

// StorageVersion is the version of etcd's storage format in which files are written.
const StorageVersion = "3.7.0"

// Contents holds the data to write to a snapshot file.
type Contents struct {
	Revision int64 // the revision of the keyspace; no key has a later one

	// Keys yields the live keys. A yielded key and its bytes are not used any more when Keys yields the next one. If
	// Keys yields an error, writing ends with that error.
	Keys iter.Seq2[*mvccpb.KeyValue, error]

	// Leases lists the leases. A lease that ended after the keys were read may be absent although keys refer to it. The
	// file then contains that lease with a TTL of 1 s.
	Leases []Lease
	Auth   Auth

	// The state of the raft group at the time of the snapshot. etcdutl replaces all of it when it restores the file.
	Index, Term uint64
	Members     []Member
}

// Lease describes a lease. Keys refer to a lease by its ID.
type Lease struct {
	ID        int64
	TTL       int64 // seconds, as granted
	Remaining int64 // seconds left; 0 means the full TTL
}

// Auth holds the settings, users and roles of etcd's Auth.
type Auth struct {
	Enabled  bool
	Revision uint64
	Users    []*authpb.User // with their password hashes
	Roles    []*authpb.Role
}

// Member describes a member of the cluster.
type Member struct {
	ID         uint64
	Name       string
	PeerURLs   []string
	ClientURLs []string
	Learner    bool
}

// Names of the buckets in etcd's database.
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

// Names of values in the buckets meta, auth and cluster.
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

// errMalformed is returned for a revision or a lease that cannot be decoded.
var errMalformed = errors.New("malformed")

// The keys of the bucket "key" are revisions: the main revision (8 bytes), an underscore, the index of the change
// within that revision (8 bytes), and a t if the change is a delete.
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

// The fields of etcd's leasepb.Lease, the value in the bucket lease. The type is not in etcd's API module.
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
