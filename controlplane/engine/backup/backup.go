// Package backup writes and reads backup archives. An archive contains one checkpoint of the state machine of each raft
// group. It is encrypted with a key that is derived from the cluster key. The checkpoints of different groups may be of
// different times.
//
// An archive is a tar stream in an age file (age-encryption.org/v1). The tar contains a manifest, and then the files of
// each group's checkpoint in a directory with the group's name.
//
// # Decisions
//
//   - age authenticates the stream in pieces of 64 KiB, including their order and the end of the stream. So Extract
//     uses no byte that was changed, and detects a truncated archive.
//   - The age file is encrypted for a passphrase (scrypt) that is derived from the given key. So only a holder of the
//     key can write an archive that Extract accepts. With a public key as recipient, anyone who knows it could write
//     one.
//   - Earlier versions wrote archives in another format (oldformat.go). These can be read, but are not written any
//     more.
//
// # The four files of a state
//
//	file             made by                   content                              for
//	mvcc checkpoint  mvcc.Engine.Checkpoint    the Pebble database of one group,    one member: source of the other files,
//	                                           a directory of hard links            removed afterwards
//	raft snapshot    records/transport,        the files of a checkpoint, sent      a member that is new or too far
//	                 when raft asks for it     between members over mutual TLS      behind the raft log
//	backup archive   trivet cluster backup     the checkpoints of all groups        a new cluster after a loss:
//	                                           and a manifest, encrypted            trivet-controlplane restore
//	etcd snapshot    trivet kv snapshot save,  keys, leases and users of group kv,  etcd and other clusters:
//	                 etcdctl snapshot save     a bbolt file, not encrypted          etcdutl, trivet kv import
//
// The package processes files and bytes only. It must not depend on state machines or raft.
package backup

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// KeyPurpose is the argument of clusterkey.Key.Derive for the key that encrypts archives. The derived key does not
// depend on the generation of the cluster key, so a restored cluster can read archives of the old cluster.
const KeyPurpose = "backup"

// Manifest describes the cluster and the raft groups in an archive. It is stored as JSON in the first file of the
// archive.
type Manifest struct {
	Version int `json:"version"`
	// Cluster is the ID of the cluster that was backed up.
	Cluster uint64 `json:"cluster"`
	// Made is the time of the backup. By is the version of the program that wrote it.
	Made   time.Time `json:"made"`
	By     string    `json:"by"`
	Groups []Group   `json:"groups"`
}

// Group describes the checkpoint of one raft group.
type Group struct {
	ID   uint64 `json:"id"`
	Name string `json:"name"`
	// Index and Term are those of the last raft log entry that the checkpoint contains.
	Index uint64 `json:"index"`
	Term  uint64 `json:"term"`
	// Revision is the newest MVCC revision in the checkpoint.
	Revision int64 `json:"revision"`
}

const (
	// Version is the version of the archive format: the manifest and the names of the files. Extract refuses other
	// versions.
	Version = 1

	manifestName = "manifest.json"
	// maxManifest is the maximum size of a manifest in bytes. maxGroups is the maximum number of groups in a manifest.
	maxManifest = 1 << 20
	maxGroups   = 10_000
)

// Write writes an encrypted archive of the groups in m to w. The map dirs has the directory with each group's
// checkpoint, by the name of the group. key has 32 bytes.
func Write(w io.Writer, key []byte, m Manifest, dirs map[string]string) error {
	m.Version = Version
	sealed, err := encrypt(w, key)
	if err != nil {
		return err
	}
	out := tar.NewWriter(sealed)
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	if err := out.WriteHeader(&tar.Header{Name: manifestName, Mode: 0o600, Size: int64(len(text)), ModTime: m.Made}); err != nil {
		return err
	}
	if _, err := out.Write(text); err != nil {
		return err
	}
	for _, g := range m.Groups {
		if err := addDir(out, dirs[g.Name], g.Name); err != nil {
			return fmt.Errorf("archive group %s: %w", g.Name, err)
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	return sealed.Close()
}

func addDir(out *tar.Writer, dir, name string) error {
	return filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		h := &tar.Header{Name: path.Join(name, filepath.ToSlash(rel)), Mode: 0o600, Size: info.Size(), ModTime: info.ModTime()}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		_, err = io.CopyN(out, f, info.Size())
		return err
	})
}

// Extract decrypts an archive completely and writes the checkpoint of each group to dir/NAME, where NAME is the group's
// name. dir must be empty. Extract syncs the files. If it returns an error, the written files must not be used.
func Extract(r io.Reader, key []byte, dir string) (m Manifest, err error) {
	opened, err := decrypt(r, key)
	if err != nil {
		return m, err
	}
	in := tar.NewReader(opened)
	h, err := in.Next()
	if err != nil {
		return m, decryptError(opened, err)
	}
	if h.Name != manifestName || h.Size > maxManifest {
		return m, errors.New("the archive has no manifest")
	}
	text, err := io.ReadAll(in)
	if err != nil {
		return m, decryptError(opened, err)
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("read the archive's manifest: %w", err)
	}
	if m.Version != Version {
		return m, fmt.Errorf("the archive has version %d, this program knows %d only: take the version that wrote it (%s)", m.Version, Version, m.By)
	}
	if len(m.Groups) == 0 || len(m.Groups) > maxGroups {
		return m, fmt.Errorf("the archive names %d groups", len(m.Groups))
	}
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return m, decryptError(opened, err)
		}
		if err := extractFile(in, h, m, dir); err != nil {
			return m, decryptError(opened, err)
		}
	}
	// tar.Reader stops at the end mark of the tar. Read the rest as well: only then is it certain that the encrypted
	// file is not truncated.
	if _, err := io.Copy(io.Discard, opened); err != nil {
		return m, decryptError(opened, err)
	}
	return m, syncTree(dir)
}

// decryptError returns the error with which decryption failed, if it failed. Otherwise it returns err, the error of
// reading the tar. A failed decryption also makes the tar unreadable, so its error is the cause.
func decryptError(p *plainReader, err error) error {
	if p.err != nil {
		return p.err
	}
	return fmt.Errorf("read the archive: %w", err)
}

func extractFile(in *tar.Reader, h *tar.Header, m Manifest, dir string) error {
	group, rest, ok := strings.Cut(h.Name, "/")
	known := slices.ContainsFunc(m.Groups, func(g Group) bool { return g.Name == group })
	if !ok || !known || rest == "" || h.Typeflag != tar.TypeReg || !filepath.IsLocal(filepath.FromSlash(h.Name)) {
		return fmt.Errorf("a file in it cannot be called %q", h.Name)
	}
	name := filepath.Join(dir, filepath.FromSlash(h.Name))
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, in)
	return errors.Join(err, f.Sync(), f.Close())
}

// syncTree syncs dir and all directories below it, so that the directory entries of the files are durable.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("sync directory: %w", err)
		}
		return errors.Join(f.Sync(), f.Close())
	})
}
