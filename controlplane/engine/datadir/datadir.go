// Package datadir locks a member's data directory, and stores in the directory the ID of the cluster that its data
// belongs to. The names of the files are in package layout.
package datadir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/filelock"
)

// Lock locks the data directory dir until the caller calls unlock. It creates the directory if needed, and removes
// temporary files that a crash has left in it. If another process holds the lock, Lock waits until the time within has
// passed, and then returns an error.
func Lock(dir string, within time.Duration) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, layout.LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := filelock.Lock(f, within); err != nil {
		f.Close()
		return nil, fmt.Errorf("another member runs in %s", dir)
	}
	if err := atomicfile.RemoveLeftovers(dir); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// LoadKey loads the cluster key from the file named by file. If file is empty, it loads the key from the data directory
// dir. If dir has no key yet, it generates one and stores it there.
func LoadKey(dir, file string) (*clusterkey.Key, error) {
	if file != "" {
		return clusterkey.Load(file)
	}
	return clusterkey.LoadOrMake(filepath.Join(dir, layout.ClusterKeyFile))
}

// CheckCluster returns an error if the data in dir belongs to another cluster than the one with the given key. If no
// cluster ID is stored in dir yet, it stores the one of key.
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

// ClusterID returns the ID of the cluster that the data in dir belongs to. It returns 0 if no ID is stored.
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

// MarkCluster durably stores in dir the ID of the cluster with the given key, as the cluster that the data belongs to.
func MarkCluster(dir string, key *clusterkey.Key) error {
	if err := atomicfile.WriteFile(filepath.Join(dir, layout.ClusterFile), []byte(key.Cluster()+"\n"), 0o600); err != nil {
		return fmt.Errorf("record the cluster of the data: %w", err)
	}
	return nil
}
