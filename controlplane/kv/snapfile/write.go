package snapfile

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

const (
	sortMemory = 32 << 20 // maximum size of keys and values that are sorted in memory, in bytes

	// Maximum size in bytes, and maximum number of keys, of one bbolt transaction. A transaction keeps its writes in
	// memory until it is committed.
	batchBytes = 16 << 20
	batchKeys  = 10_000

	expiredTTL = 1 // TTL of leases that have ended, in seconds
)

// Stream writes a snapshot file with the contents c to w, followed by the file's SHA-256, as etcd's
// Maintenance.Snapshot does. It first creates the file in the directory dir, which must have space for about twice the
// size of the keys and values. The SHA-256 (32 bytes) is written by a separate Write call, the last one.
func Stream(ctx context.Context, w io.Writer, dir string, c Contents) error {
	f, err := Create(ctx, dir, c)
	if err != nil {
		return err
	}
	return errors.Join(f.Stream(ctx, w), f.Close())
}

// TempFile is a snapshot file that is ready to be sent. The caller must close it.
type TempFile struct{ db *bbolt.DB }

// Create creates a snapshot file with the contents c in dir, and unlinks it.
func Create(ctx context.Context, dir string, c Contents) (*TempFile, error) {
	m, err := createDB(dir)
	if err != nil {
		return nil, fmt.Errorf("make snapshot file: %w", err)
	}
	if err := m.fill(ctx, dir, c); err != nil {
		return nil, errors.Join(fmt.Errorf("write snapshot file: %w", err), m.Close())
	}
	return m, nil
}

func createDB(dir string) (*TempFile, error) {
	f, err := os.CreateTemp(dir, "snapshot-")
	if err != nil {
		return nil, err
	}
	name := f.Name()
	// The file is not used after a crash, so bbolt need not sync it to the disk.
	db, err := bbolt.Open(name, 0o600, &bbolt.Options{NoSync: true, NoGrowSync: true, FreelistType: bbolt.FreelistMapType})
	if err = errors.Join(err, f.Close(), os.Remove(name)); err != nil {
		if db != nil {
			err = errors.Join(err, db.Close())
		}
		return nil, err
	}
	return &TempFile{db}, nil
}

// Close closes the file, which also frees its disk space, because the file is unlinked.
func (m *TempFile) Close() error { return m.db.Close() }

// Size returns the size of the file in bytes, without the SHA-256.
func (m *TempFile) Size() (size int64) {
	// View fails only if the database is closed.
	_ = m.db.View(func(tx *bbolt.Tx) error {
		size = tx.Size()
		return nil
	})
	return size
}

// Stream writes the file to w, followed by its SHA-256 in a separate Write call.
func (m *TempFile) Stream(ctx context.Context, w io.Writer) error {
	sum := sha256.New()
	to := &contextWriter{ctx: ctx, w: io.MultiWriter(w, sum)}
	err := m.db.View(func(tx *bbolt.Tx) error {
		if _, err := tx.WriteTo(to); err != nil {
			return cmp.Or(to.err, err)
		}
		return nil
	})
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	if err != nil {
		return fmt.Errorf("send snapshot file: %w", err)
	}
	return nil
}

// contextWriter writes to w until ctx is done. It stores the error of the last write, because bbolt returns only the
// error's text.
type contextWriter struct {
	ctx context.Context
	w   io.Writer
	err error
}

func (u *contextWriter) Write(b []byte) (n int, err error) {
	if err = context.Cause(u.ctx); err == nil {
		n, err = u.w.Write(b)
	}
	u.err = err
	return n, err
}

func (m *TempFile) fill(ctx context.Context, dir string, c Contents) error {
	err := m.db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketKey, bucketMeta, bucketLease, bucketAlarm, bucketCluster, bucketMembers,
			bucketMembersRemoved, bucketAuth, bucketAuthUsers, bucketAuthRoles} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return errors.Join(c.fillMeta(tx.Bucket(bucketMeta)), c.fillMembers(tx), c.fillLeases(tx.Bucket(bucketLease)), c.Auth.fill(tx))
	})
	if err != nil {
		return err
	}
	byRevision := newSorter(dir, sortMemory)
	return errors.Join(m.fillKeys(ctx, c, byRevision), byRevision.close())
}

func (c *Contents) fillMeta(b *bbolt.Bucket) error {
	var state struct {
		Voters    []uint64 `json:"voters"`
		Learners  []uint64 `json:"learners,omitempty"`
		AutoLeave bool     `json:"auto_leave"`
	}
	for _, m := range c.Members {
		if m.Learner {
			state.Learners = append(state.Learners, m.ID)
		} else {
			state.Voters = append(state.Voters, m.ID)
		}
	}
	voters, err := json.Marshal(state)
	if err != nil {
		return err
	}
	values := []entry{{metaConfState, voters}, {metaStorageVersion, []byte(StorageVersion)}}
	if c.Index > 0 { // etcd treats 0 as unknown
		values = append(values, entry{metaIndex, fixed64(c.Index)}, entry{metaTerm, fixed64(c.Term)})
	}
	if c.Revision > 1 {
		compacted := appendRevision(nil, c.Revision, 0)
		values = append(values, entry{metaScheduledCompact, compacted}, entry{metaFinishedCompact, compacted})
	}
	return put(b, values...)
}

// fillMembers writes the members in the JSON format of etcd's server.
func (c *Contents) fillMembers(tx *bbolt.Tx) error {
	for _, m := range c.Members {
		text, err := json.Marshal(struct {
			ID         uint64   `json:"id"`
			PeerURLs   []string `json:"peerURLs"`
			IsLearner  bool     `json:"isLearner,omitempty"`
			Name       string   `json:"name,omitempty"`
			ClientURLs []string `json:"clientURLs,omitempty"`
		}{m.ID, m.PeerURLs, m.Learner, m.Name, m.ClientURLs})
		if err != nil {
			return err
		}
		if err := put(tx.Bucket(bucketMembers), entry{[]byte(strconv.FormatUint(m.ID, 16)), text}); err != nil {
			return err
		}
	}
	return put(tx.Bucket(bucketCluster), entry{clusterVersion, []byte(StorageVersion)})
}

func (c *Contents) fillLeases(b *bbolt.Bucket) error {
	for _, l := range c.Leases {
		if err := put(b, entry{fixed64(uint64(l.ID)), l.encode()}); err != nil {
			return err
		}
	}
	return nil
}

func (a *Auth) fill(tx *bbolt.Tx) error {
	enabled := []byte{0}
	if a.Enabled {
		enabled[0] = 1
	}
	if err := put(tx.Bucket(bucketAuth), entry{authEnabled, enabled}, entry{authRevision, fixed64(max(a.Revision, 1))}); err != nil {
		return err
	}
	for _, u := range a.Users {
		if err := putProto(tx.Bucket(bucketAuthUsers), u.Name, u); err != nil {
			return err
		}
	}
	for _, r := range a.Roles {
		if err := putProto(tx.Bucket(bucketAuthRoles), r.Name, r); err != nil {
			return err
		}
	}
	return nil
}

func putProto(b *bbolt.Bucket, name []byte, m proto.Message) error {
	text, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return put(b, entry{name, text})
}

func put(b *bbolt.Bucket, values ...entry) error {
	for _, v := range values {
		if err := b.Put(v.key, v.value); err != nil {
			return fmt.Errorf("put %q: %w", v.key, err)
		}
	}
	return nil
}

// fillKeys sorts the keys by revision and writes them to the file. It also writes leases that keys refer to but
// c.Leases lacks. If no key has the revision c.Revision, it also writes a tombstone with that revision.
func (m *TempFile) fillKeys(ctx context.Context, c Contents, byRevision *sorter) error {
	newest, unusedKey := int64(0), []byte{0}
	missing := map[int64]bool{}
	for _, l := range c.Leases {
		missing[l.ID] = false
	}
	var revision, value []byte
	for kv, err := range c.Keys {
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("read keys: %w", err)
		}
		if kv.ModRevision < 1 || kv.ModRevision > c.Revision || len(kv.Key) == 0 {
			return fmt.Errorf("key %q of revision %d in a snapshot of revision %d: %w", kv.Key, kv.ModRevision, c.Revision, errMalformed)
		}
		if value, err = (proto.MarshalOptions{}).MarshalAppend(value[:0], kv); err != nil {
			return fmt.Errorf("encode key %q: %w", kv.Key, err)
		}
		revision = binary.BigEndian.AppendUint64(revision[:0], uint64(kv.ModRevision))
		if err := byRevision.add(revision, value); err != nil {
			return err
		}
		newest = max(newest, kv.ModRevision)
		if _, known := missing[kv.Lease]; kv.Lease != 0 && !known {
			missing[kv.Lease] = true
		}
		// The key of the tombstone, unusedKey, must differ from every live key. It therefore consists of zero bytes
		// only, and is longer than every live key that consists of zero bytes only.
		if len(kv.Key) >= len(unusedKey) && len(bytes.Trim(kv.Key, "\x00")) == 0 {
			unusedKey = make([]byte, len(kv.Key)+1)
		}
	}
	t := &batch{ctx: ctx, db: m.db}
	main, sub := int64(0), int64(0)
	for e, err := range byRevision.sorted() {
		if err != nil {
			return errors.Join(err, t.rollback())
		}
		if r := int64(binary.BigEndian.Uint64(e.key)); r != main {
			main, sub = r, 0
		}
		revision = appendRevision(revision[:0], main, sub)
		if err := t.put(revision, e.value); err != nil {
			return errors.Join(err, t.rollback())
		}
		sub++
	}
	if newest < c.Revision && c.Revision > 1 {
		value, err := proto.Marshal(&mvccpb.KeyValue{Key: unusedKey})
		if err == nil {
			err = t.put(append(appendRevision(nil, c.Revision, 0), tombstoneMark), value)
		}
		if err != nil {
			return errors.Join(err, t.rollback())
		}
	}
	return errors.Join(t.commit(), m.fillExpiredLeases(missing))
}

// fillExpiredLeases writes the leases to which keys refer but which no longer exist. Their TTL is expiredTTL. The map
// missing has the value true for the IDs of these leases.
func (m *TempFile) fillExpiredLeases(missing map[int64]bool) error {
	var leases Contents
	for id, isMissing := range missing {
		if isMissing {
			leases.Leases = append(leases.Leases, Lease{ID: id, TTL: expiredTTL})
		}
	}
	return m.db.Update(func(tx *bbolt.Tx) error { return leases.fillLeases(tx.Bucket(bucketLease)) })
}

// batch writes keys to the bucket "key", in transactions of limited size.
type batch struct {
	ctx   context.Context
	db    *bbolt.DB
	tx    *bbolt.Tx
	to    *bbolt.Bucket
	keys  int
	bytes int
}

// put adds a key and its value. The key must sort after all keys added before. The caller may reuse the slices key and
// value: put clones value, because bbolt retains it.
func (t *batch) put(key, value []byte) (err error) {
	if t.keys >= batchKeys || t.bytes >= batchBytes {
		if err := t.commit(); err != nil {
			return err
		}
	}
	if t.tx == nil {
		if err := context.Cause(t.ctx); err != nil {
			return err
		}
		if t.tx, err = t.db.Begin(true); err != nil {
			return err
		}
		t.to = t.tx.Bucket(bucketKey)
		t.to.FillPercent = 0.95 // fills pages almost completely, because keys are only appended
		t.keys, t.bytes = 0, 0
	}
	t.keys++
	t.bytes += len(key) + len(value)
	return t.to.Put(key, bytes.Clone(value))
}

func (t *batch) commit() error {
	if t.tx == nil {
		return nil
	}
	tx := t.tx
	t.tx = nil
	return tx.Commit()
}

func (t *batch) rollback() error {
	if t.tx == nil {
		return nil
	}
	tx := t.tx
	t.tx = nil
	return tx.Rollback()
}
