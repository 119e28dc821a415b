// Package layout holds the IDs of a member's raft groups and the names of the files in its data directory. The values
// are part of the format on disk and on the wire: a changed value makes members unable to read their own data.
//
// Every program and test that opens a data directory uses these constants. The package must not import others of the
// module.
package layout

// The IDs of a member's raft groups.
const (
	// SystemGroup replicates the platform's records: users, VMs, hosts, images, credit, members.
	SystemGroup uint64 = 1
	// KVGroup replicates the keys of the key-value store.
	KVGroup uint64 = 2
)

// The names of the groups. A group's name is also the directory of its state, and its name in backups, logs and metrics.
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

// Files and directories in the data directory. The state of each group is in a directory of the group's name.
const (
	// LockFile is locked by the process that uses the data directory.
	LockFile = "lock"
	// ClusterFile holds the ID of the cluster that the data belongs to.
	ClusterFile = "cluster"
	// ClusterKeyFile holds the cluster key. A single member creates it; a joining member gets it with the join token.
	ClusterKeyFile = "cluster.key"
	// NodeIDFile holds the member ID that the cluster assigned when the member joined without one.
	NodeIDFile = "node-id"
	// AdminTokenFile holds an access token of the administrator.
	AdminTokenFile = "admin.token"

	// RaftDir is the directory that package consensus writes to. Offline commands prepare its replacement in
	// NewRaftDir. OldRaftDir is the replaced directory until it is removed.
	RaftDir    = "raft"
	NewRaftDir = "raft.new"
	OldRaftDir = "raft.old"
	// RaftLogDir is the directory of the raft log, as package consensus names it.
	RaftLogDir = RaftDir + "/log"

	// ImagesDir holds the contents of images. ImportDir holds files that an administrator may import by default.
	ImagesDir = "images"
	ImportDir = "import"
	// BackupDir and RestoreDir hold checkpoints while a backup is written or restored.
	BackupDir  = "backup.tmp"
	RestoreDir = "restore.tmp"
)
