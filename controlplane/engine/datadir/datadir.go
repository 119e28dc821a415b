// Package datadir locks a member's data directory, records which cluster the data belongs to, and replaces files so
// that a crash leaves either the old or the new content. Package layout has the names of the files.
package datadir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
)

// Lock creates the data directory if needed and locks it until unlock is called. It returns an error if another process
// holds the lock.
func Lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, layout.LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another member runs in %s", dir)
	}
	return func() { f.Close() }, nil
}

// LoadKey loads the cluster key from file or, if file is empty, from the data directory. There it creates a key on
// first use.
func LoadKey(dir, file string) (*clusterkey.Key, error) {
	if file != "" {
		return clusterkey.Load(file)
	}
	return clusterkey.LoadOrMake(filepath.Join(dir, layout.ClusterKeyFile))
}

// CheckCluster returns an error if the data belongs to another cluster than the key. It calls MarkCluster if no cluster
// was recorded yet.
func CheckCluster(dir string, key *clusterkey.Key) error {
	have, err := ClusterID(dir)
	switch {
	case err != nil:
		return err
	case have == 0:
		return MarkCluster(dir, key)
	case have != key.ClusterID():
		return fmt.Errorf("the data in %s belongs to cluster %d, the key to cluster %d: use the key of the data's cluster", dir, have, key.ClusterID())
	}
	return nil
}

// ClusterID returns the ID of the cluster that the data belongs to, or 0 if none was recorded.
func ClusterID(dir string) (uint64, error) {
	path := filepath.Join(dir, layout.ClusterFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the cluster of the data: %w", err)
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || id == 0 {
		return 0, fmt.Errorf("%s does not hold a cluster's id", path)
	}
	return id, nil
}

// MarkCluster records that the data belongs to the cluster of the key.
func MarkCluster(dir string, key *clusterkey.Key) error {
	return WriteFile(dir, layout.ClusterFile, key.Cluster()+"\n")
}

// WriteFile replaces a file of the directory and syncs both. After a crash the file has its old or its new content.
func WriteFile(dir, name, text string) error {
	temporary := filepath.Join(dir, name+".new")
	f, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = os.Rename(temporary, filepath.Join(dir, name))
	}
	if err == nil {
		err = Sync(dir)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Sync makes creations, renames and removals in a directory durable.
func Sync(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
