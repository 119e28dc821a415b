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

// ErrForeign is of a file that is no snapshot of etcd's.
var ErrForeign = errors.New("not a snapshot of etcd")

// ErrBroken is of a snapshot that was cut off or changed.
var ErrBroken = errors.New("the snapshot is broken")

// Counts says how much is in a file.
type Counts struct {
	Keys      int64 // live
	Bytes     int64 // of live keys and their values
	Revisions int64 // entries of the history, the live keys among them
	Leases    int
	Users     int
	Roles     int
}

// File is a snapshot that was opened and found whole. It is not to be used by several goroutines.
type File struct {
	Revision int64  // the newest
	Version  string // of etcd's storage; empty before 3.6
	Leases   []Lease
	Auth     Auth
	Counts   Counts
	Verified bool // by a SHA-256; without one only the structure was checked

	db   *bbolt.DB
	live *sorter // by create revision and place: the places of the live keys
}

// indexRoom is how much of the keys is sorted in memory.
const indexRoom = 32 << 20

// Open opens a snapshot, as etcdctl saves it or as an etcd that does not run left it in its data directory, and checks all of
// it: the file is read twice. Its errors wrap ErrForeign, ErrBroken or what the disk said. What does not fit into memory
// goes to the directory for temporary files. Nobody may write to the file until Close.
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
		return nil, fmt.Errorf("%w: %w", ErrBroken, err)
	}
	f := &File{Verified: verified, db: db, live: newSorter("", indexRoom)}
	if err := f.view(f.load); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close lets go of the file.
func (f *File) Close() error { return errors.Join(f.live.close(), f.db.Close()) }

// verify checks what can be told without looking into the database.
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
		return false, fmt.Errorf("%w: not a regular file", ErrForeign)
	}
	// A database is made of whole pages.
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
		return false, fmt.Errorf("%w: cut off: it has %d bytes", ErrBroken, info.Size())
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
		return false, fmt.Errorf("%w: its SHA-256 is another", ErrBroken)
	}
	return true, checkTree(file)
}

// view runs read with the database. A fault of the disk under the mapped file, or in bbolt, is an error.
func (f *File) view(read func(*bbolt.Tx) error) error {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	return f.db.View(func(tx *bbolt.Tx) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%w: %v", ErrBroken, p)
			}
		}()
		return read(tx)
	})
}

func (f *File) load(tx *bbolt.Tx) error {
	for _, name := range [][]byte{bucketKey, bucketMeta} {
		if tx.Bucket(name) == nil {
			return fmt.Errorf("%w: it has no bucket %s", ErrForeign, name)
		}
	}
	byKey := newSorter("", indexRoom)
	defer byKey.close() // nothing can be lost
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
				return fmt.Errorf("%w: %s: %w", ErrBroken, name, err)
			}
			f.Revision = max(f.Revision, compacted)
		}
	}
	f.Revision = max(f.Revision, 1)
	if err := errors.Join(f.loadLeases(tx), f.loadAuth(tx)); err != nil {
		return fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return nil
}

// loadHistory sorts all revisions by key, the newest of a key last.
func (f *File) loadHistory(b *bbolt.Bucket, byKey *sorter) error {
	kv := &mvccpb.KeyValue{}
	var place []byte
	return b.ForEach(func(revision, value []byte) error {
		main, _, _, err := splitRevision(revision)
		if err == nil && value == nil {
			err = fmt.Errorf("revision %x is a bucket: %w", revision, errMalformed)
		}
		if err == nil {
			err = proto.Unmarshal(value, kv)
		}
		if err != nil {
			return fmt.Errorf("%w: key bucket: %w", ErrBroken, err)
		}
		f.Revision = max(f.Revision, main)
		f.Counts.Revisions++
		if len(kv.Key) == 0 {
			return nil // etcdutl's --bump-revision writes one
		}
		place = binary.BigEndian.AppendUint64(place[:0], uint64(kv.CreateRevision))
		place = binary.BigEndian.AppendUint64(place, uint64(len(kv.Key)+len(kv.Value)))
		return byKey.add(kv.Key, append(place, revision...))
	})
}

// loadLive sorts the newest revision of each key that is live by where the key was created.
func (f *File) loadLive(byKey *sorter) error {
	var key, newest []byte
	take := func() error {
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
			if err := take(); err != nil {
				return err
			}
			key = append(key[:0], e.key...)
		}
		newest = append(newest[:0], e.value...)
	}
	return take()
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
		each(tx, bucketAuthUsers, func(value []byte) error {
			u := &authpb.User{}
			f.Auth.Users = append(f.Auth.Users, u)
			return proto.Unmarshal(value, u)
		}),
		each(tx, bucketAuthRoles, func(value []byte) error {
			r := &authpb.Role{}
			f.Auth.Roles = append(f.Auth.Roles, r)
			return proto.Unmarshal(value, r)
		}))
	f.Counts.Users, f.Counts.Roles = len(f.Auth.Users), len(f.Auth.Roles)
	return err
}

func each(tx *bbolt.Tx, bucket []byte, visit func(value []byte) error) error {
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

// Keys yields the live keys in the order in which they were created, with their revisions, versions and leases. A key is
// the caller's to keep. After an error there is no more.
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
			return fmt.Errorf("%w: revision %x is gone", ErrBroken, revision)
		}
		return proto.Unmarshal(value, kv)
	})
	return kv, err
}
