// Package backup is the file form of a whole cloud: the states of all groups, each as of one moment, in one archive that
// is encrypted with a key of the cluster's.
//
// An archive is a header, then a tar in sealed pieces: a manifest first, then each group's checkpoint below its name.
//
//	magic, 10 bytes | key id, 8 | salt, 16 | pieces: length, 4, big endian, of what follows; AES-256-GCM
//
// Each archive has a key of its own, derived from the cluster's with the salt. The nonce of a piece is its number, and
// whether it is the last one is sealed with it: pieces cannot be changed, moved, dropped or added, and an archive that
// was cut short is never taken for a whole one. The key id, which tells nothing of the key, lets the wrong key be told
// from damage.
//
// It knows files and bytes only: not what a state is, nor how it is agreed on.
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

// KeyPurpose is the purpose for which the key of an archive is derived from the cluster key. The result is the same for
// all renewals of a cluster key, so that a renewed key reads older archives.
const KeyPurpose = "backup"

// Manifest says what an archive holds.
type Manifest struct {
	Version int `json:"version"`
	// Cluster is the id of the cluster that was backed up.
	Cluster uint64 `json:"cluster"`
	// Made is when, and By the program's version.
	Made   time.Time `json:"made"`
	By     string    `json:"by"`
	Groups []Group   `json:"groups"`
}

// Group is one group's state.
type Group struct {
	ID   uint64 `json:"id"`
	Name string `json:"name"`
	// Index and Term are where the state is in the group's log.
	Index uint64 `json:"index"`
	Term  uint64 `json:"term"`
	// Revision is the newest of its keyspace.
	Revision int64 `json:"revision"`
}

const (
	// Version of what is in an archive.
	Version = 1

	manifestName = "manifest.json"
	// maxManifest bounds a manifest that is read, and maxGroups what it may name.
	maxManifest = 1 << 20
	maxGroups   = 10_000
)

// Write writes an archive of the manifest's groups, whose checkpoints are in dirs by name, under the 32 bytes of key.
func Write(w io.Writer, key []byte, m Manifest, dirs map[string]string) error {
	m.Version = Version
	sealed, err := newSealer(w, key)
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

// Extract reads a whole archive into dir, which must be empty: each group's checkpoint below its name, synced. Only when
// it returns without an error is what it wrote worth anything.
func Extract(r io.Reader, key []byte, dir string) (m Manifest, err error) {
	opened, err := newOpener(r, key)
	if err != nil {
		return m, err
	}
	in := tar.NewReader(opened)
	h, err := in.Next()
	if err != nil {
		return m, said(opened, err)
	}
	if h.Name != manifestName || h.Size > maxManifest {
		return m, errors.New("the archive has no manifest")
	}
	text, err := io.ReadAll(in)
	if err != nil {
		return m, said(opened, err)
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
			return m, said(opened, err)
		}
		if err := extractFile(in, h, m, dir); err != nil {
			return m, said(opened, err)
		}
	}
	// tar stops at its end mark: the last piece, which says that nothing is missing, comes after it.
	if _, err := io.Copy(io.Discard, opened); err != nil {
		return m, said(opened, err)
	}
	return m, syncTree(dir)
}

// said prefers why the seal did not open to what tar made of that.
func said(o *opener, err error) error {
	if o.err != nil && !errors.Is(o.err, io.EOF) {
		return o.err
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

// syncTree makes the names of files as durable as their bytes.
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
