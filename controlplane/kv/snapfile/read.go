package snapfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"runtime/debug"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

// ErrNotSnapshot is returned for a file that is not an etcd snapshot.
var ErrNotSnapshot = errors.New("not an etcd snapshot")

// ErrCorrupt is returned for a snapshot file that was truncated or changed.
var ErrCorrupt = errors.New("the snapshot is corrupt")

// Counts holds the numbers of objects in a file.
type Counts struct {
	Keys      int64 // live keys
	Bytes     int64 // size of the live keys and their values
	Revisions int64 // entries in the history, including the live keys
	Leases    int
	Users     int
	Roles     int
}

// File is an open snapshot file whose content Open has checked. It is not safe for concurrent use.
type File struct {
	Revision int64  // newest revision in the file
	Version  string // etcd's storage version; empty before 3.6
	Leases   []Lease
	Auth     Auth
	Counts   Counts
	Verified bool // the SHA-256 matched; false if there is none, so that only the structure was checked

	db   *bbolt.DB
	live *sorter // revisions of the live keys, sorted by create revision, then by revision
}

// indexMemory is the memory limit of each sorter that Open uses, in bytes.
const indexMemory = 32 << 20

// Open opens a snapshot file saved by etcdctl, or the database file in the data directory of a stopped etcd. It checks
// the whole file, which it reads twice. An error wraps ErrNotSnapshot, ErrCorrupt or the I/O error. Open may create
// files for sorting in the directory for temporary files. No process may write to the file until Close.
func Open(path string) (_ *File, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open snapshot %s: %w", path, err)
		}
	}()
	verified, err := verify(path)
	if err != nil {
		return nil, err
	}
	db, err := bbolt.Open(path, 0o400, &bbolt.Options{ReadOnly: true, Timeout: 1})
	switch {
	case errors.Is(err, bbolterrors.ErrTimeout):
		return nil, errors.New("another process has it open")
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	f := &File{Verified: verified, db: db, live: newSorter("", indexMemory)}
	if err := f.view(f.load); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close closes the snapshot file and removes the temporary files of Open.
func (f *File) Close() error { return errors.Join(f.live.close(), f.db.Close()) }

// verify checks the file's size, its SHA-256 if it has one, and the structure of the database. The result verified is
// true if the file has a SHA-256 that matches.
func verify(path string) (verified bool, err error) {
	file, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, fmt.Errorf("%w: not a regular file", ErrNotSnapshot)
	}
	// The size of a database is a multiple of 512 bytes. If 32 bytes remain, they are the SHA-256.
	const sector = 512
	size := info.Size()
	rest := size % sector
	if rest == sha256.Size {
		size -= sha256.Size
	}
	need, err := checkMeta(file)
	switch {
	case err != nil:
		return false, err
	case rest != 0 && rest != sha256.Size || size < need:
		return false, fmt.Errorf("%w: truncated: it has %d bytes", ErrCorrupt, info.Size())
	case rest == 0:
		return false, checkTree(file)
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(file, 0, size)); err != nil {
		return false, err
	}
	want := make([]byte, sha256.Size)
	if _, err := file.ReadAt(want, size); err != nil {
		return false, err
	}
	if !bytes.Equal(want, sum.Sum(nil)) {
		return false, fmt.Errorf("%w: its SHA-256 does not match", ErrCorrupt)
	}
	return true, checkTree(file)
}

// view calls the function read in a read-only transaction. It returns an error if the mapped file cannot be read or
// bbolt panics.
func (f *File) view(read func(*bbolt.Tx) error) error {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	return f.db.View(func(tx *bbolt.Tx) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%w: %v", ErrCorrupt, p)
			}
		}()
		return read(tx)
	})
}

func (f *File) load(tx *bbolt.Tx) error {
	for _, name := range [][]byte{bucketKey, bucketMeta} {
		if tx.Bucket(name) == nil {
			return fmt.Errorf("%w: it has no bucket %s", ErrNotSnapshot, name)
		}
	}
	byKey := newSorter("", indexMemory)
	defer byKey.close() // its file is unlinked and no longer needed, so an error has no effect
	if err := f.loadHistory(tx.Bucket(bucketKey), byKey); err != nil {
		return err
	}
	if err := f.loadLive(byKey); err != nil {
		return err
	}
	meta := tx.Bucket(bucketMeta)
	f.Version = string(meta.Get(metaStorageVersion))
	for _, name := range [][]byte{metaScheduledCompact, metaFinishedCompact} {
		if b := meta.Get(name); b != nil {
			compacted, _, _, err := splitRevision(b)
			if err != nil {
				return fmt.Errorf("%w: %s: %w", ErrCorrupt, name, err)
			}
			f.Revision = max(f.Revision, compacted)
		}
	}
	f.Revision = max(f.Revision, 1)
	if err := errors.Join(f.loadLeases(tx), f.loadAuth(tx)); err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return nil
}

// loadHistory adds all revisions in the bucket to the sorter byKey, which sorts them by key. For the same key, the
// newest revision is last.
func (f *File) loadHistory(b *bbolt.Bucket, byKey *sorter) error {
	kv := &mvccpb.KeyValue{}
	var sortValue []byte
	return b.ForEach(func(revision, value []byte) error {
		main, _, _, err := splitRevision(revision)
		if err == nil && value == nil {
			err = fmt.Errorf("revision %x is a bucket: %w", revision, errMalformed)
		}
		if err == nil {
			err = proto.Unmarshal(value, kv)
		}
		if err != nil {
			return fmt.Errorf("%w: key bucket: %w", ErrCorrupt, err)
		}
		f.Revision = max(f.Revision, main)
		f.Counts.Revisions++
		if len(kv.Key) == 0 {
			return nil // etcdutl's --bump-revision writes an entry without a key
		}
		sortValue = binary.BigEndian.AppendUint64(sortValue[:0], uint64(kv.CreateRevision))
		sortValue = binary.BigEndian.AppendUint64(sortValue, uint64(len(kv.Key)+len(kv.Value)))
		return byKey.add(kv.Key, append(sortValue, revision...))
	})
}

// loadLive finds the newest revision of each key. If this revision is not a tombstone, loadLive adds it to the sorter
// f.live, which sorts by create revision.
func (f *File) loadLive(byKey *sorter) error {
	var key, newest []byte
	addLive := func() error {
		if newest == nil {
			return nil
		}
		created, size, revision := newest[:8], binary.BigEndian.Uint64(newest[8:]), newest[16:]
		if len(revision) == tombstoneBytes {
			return nil
		}
		f.Counts.Keys++
		f.Counts.Bytes += int64(size)
		return f.live.add(append(bytes.Clone(created), revision...), nil)
	}
	for e, err := range byKey.sorted() {
		if err != nil {
			return err
		}
		if !bytes.Equal(e.key, key) {
			if err := addLive(); err != nil {
				return err
			}
			key = append(key[:0], e.key...)
		}
		newest = append(newest[:0], e.value...)
	}
	return addLive()
}

func (f *File) loadLeases(tx *bbolt.Tx) error {
	b := tx.Bucket(bucketLease)
	if b == nil {
		return nil
	}
	return b.ForEach(func(id, value []byte) error {
		l, err := decodeLease(value)
		if err != nil || len(id) != 8 || l.ID != int64(binary.BigEndian.Uint64(id)) {
			return fmt.Errorf("lease %x: %w", id, errors.Join(err, errMalformed))
		}
		f.Leases = append(f.Leases, l)
		f.Counts.Leases++
		return nil
	})
}

func (f *File) loadAuth(tx *bbolt.Tx) error {
	if b := tx.Bucket(bucketAuth); b != nil {
		f.Auth.Enabled = bytes.Equal(b.Get(authEnabled), []byte{1})
		if revision := b.Get(authRevision); len(revision) == 8 {
			f.Auth.Revision = binary.BigEndian.Uint64(revision)
		}
	}
	err := errors.Join(
		forEachValue(tx, bucketAuthUsers, func(value []byte) error {
			u := &authpb.User{}
			f.Auth.Users = append(f.Auth.Users, u)
			return proto.Unmarshal(value, u)
		}),
		forEachValue(tx, bucketAuthRoles, func(value []byte) error {
			r := &authpb.Role{}
			f.Auth.Roles = append(f.Auth.Roles, r)
			return proto.Unmarshal(value, r)
		}))
	f.Counts.Users, f.Counts.Roles = len(f.Auth.Users), len(f.Auth.Roles)
	return err
}

func forEachValue(tx *bbolt.Tx, bucket []byte, visit func(value []byte) error) error {
	b := tx.Bucket(bucket)
	if b == nil {
		return nil
	}
	return b.ForEach(func(name, value []byte) error {
		if err := visit(value); err != nil {
			return fmt.Errorf("%s %q: %w", bucket, name, err)
		}
		return nil
	})
}

// Keys yields the live keys in the order of their creation, with their revisions, versions and leases. The yielded
// values remain valid. Iteration ends at the first error.
func (f *File) Keys() iter.Seq2[*mvccpb.KeyValue, error] {
	return func(yield func(*mvccpb.KeyValue, error) bool) {
		for e, err := range f.live.sorted() {
			var kv *mvccpb.KeyValue
			if err == nil {
				kv, err = f.read(e.key[8:])
			}
			if !yield(kv, err) || err != nil {
				return
			}
		}
	}
}

func (f *File) read(revision []byte) (*mvccpb.KeyValue, error) {
	kv := &mvccpb.KeyValue{}
	err := f.view(func(tx *bbolt.Tx) error {
		value := tx.Bucket(bucketKey).Get(revision)
		if value == nil {
			return fmt.Errorf("%w: revision %x is missing", ErrCorrupt, revision)
		}
		return proto.Unmarshal(value, kv)
	})
	return kv, err
}
