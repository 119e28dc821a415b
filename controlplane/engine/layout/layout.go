// Package layout defines the IDs and names of a member's raft groups, and the names of the files in its data directory.
// The values are part of the format on disk and on the wire. If a value changed, members could not read their existing
// data.
//
// Every program and test that opens a data directory uses these constants. The package must not import other packages
// of the module.
package layout

// The IDs of a member's raft groups. Every member has both groups.
const (
	// SystemGroup replicates the platform's records: users, VMs, hosts, images, credit, members.
	SystemGroup uint64 = 1
	// KVGroup replicates the etcd-compatible key-value store.
	KVGroup uint64 = 2
)

// The names of the groups. A group's state is stored in a directory of this name. The name is also used in backups,
// logs and metrics.
const (
	SystemName = "system"
	KVName     = "kv"
)

// Group is the ID of a raft group and its name.
type Group struct {
	ID   uint64
	Name string
}

// Groups returns all raft groups, in the order in which a member opens them.
func Groups() []Group { return []Group{{SystemGroup, SystemName}, {KVGroup, KVName}} }

// Names returns a map from the ID to the name of each raft group.
func Names() map[uint64]string {
	names := map[uint64]string{}
	for _, g := range Groups() {
		names[g.ID] = g.Name
	}
	return names
}

// The names of files and directories in the data directory. In addition, the state of each raft group is in a directory
// with the group's name.
const (
	// LockFile is a file that the process using the data directory holds locked.
	LockFile = "lock"
	// ClusterFile contains the ID of the cluster that the data in the directory belongs to.
	ClusterFile = "cluster"
	// ClusterKeyFile contains the cluster key. In a cluster with a single member, the member generates it. A joining
	// member gets it with the join token.
	ClusterKeyFile = "cluster.key"
	// NodeIDFile contains the member ID that the cluster assigned to a member that joined without an ID of its own.
	NodeIDFile = "node-id"
	// AdminTokenFile contains an access token of the cluster's administrator.
	AdminTokenFile = "admin.token"

	// RaftDir is the directory in which package consensus stores the raft log. Commands that replace it while the
	// member is stopped prepare the new content in NewRaftDir, and rename the old directory to OldRaftDir before they
	// remove it.
	RaftDir    = "raft"
	NewRaftDir = "raft.new"
	OldRaftDir = "raft.old"
	// RaftLogDir is the directory of the raft log. The name of the subdirectory is determined by package consensus.
	RaftLogDir = RaftDir + "/log"

	// ImagesDir contains the stored images. ImportDir is the default directory from which an administrator may import
	// images.
	ImagesDir = "images"
	ImportDir = "import"
	// BackupTimeFile contains the time of the last backup that this member completed, in Unix seconds.
	BackupTimeFile = "backup-time"
	// BackupDir and RestoreDir contain checkpoints temporarily, while a backup is written or restored.
	BackupDir  = "backup.tmp"
	RestoreDir = "restore.tmp"
)
