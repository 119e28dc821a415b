package main

const (
	etcdKV          = "/etcdserverpb.KV/"
	etcdLease       = "/etcdserverpb.Lease/"
	etcdCluster     = "/etcdserverpb.Cluster/"
	etcdMaintenance = "/etcdserverpb.Maintenance/"
	etcdAuth        = "/etcdserverpb.Auth/"
)

// etcdRows lists the rows of the authorization matrix for etcd's API, which is called from loopback with etcd's Auth
// enabled. Bytes are in base64: YQ== is "a".
var etcdRows = []row{
	{name: etcdKV + "Range", body: `{"key":"YQ=="}`, allowed: "OK"},
	{name: etcdKV + "RangeStream", body: `{"key":"YQ=="}`, allowed: "OK"},
	{name: etcdKV + "Put", body: `{"key":"YQ=="}`, allowed: "OK"},
	{name: etcdKV + "DeleteRange", body: `{"key":"Yg=="}`, allowed: "OK"},
	{name: etcdKV + "Txn", body: `{"success":[{"request_range":{"key":"YQ=="}}]}`, allowed: "OK"},
	{name: etcdKV + "Compact", body: `{"revision":1000000}`, allowed: "OUT_OF_RANGE"},
	{name: "/etcdserverpb.Watch/Watch", body: `{"create_request":{"key":"YQ=="}}`, allowed: "OK", exceptions: deniedInResponse},
	{name: etcdLease + "LeaseGrant", body: `{"TTL":60}`, allowed: "OK"},
	{name: etcdLease + "LeaseRevoke", body: `{"ID":7}`, allowed: "NOT_FOUND"},
	{name: etcdLease + "LeaseKeepAlive", body: `{"ID":7}`, allowed: "OK"},
	{name: etcdLease + "LeaseTimeToLive", body: `{"ID":7}`, allowed: "OK"},
	{name: etcdLease + "LeaseLeases", body: `{}`, allowed: "OK"},
	{name: etcdCluster + "MemberAdd", body: `{"peerURLs":["$peer"]}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdCluster + "MemberRemove", body: `{"ID":99}`, allowed: "NOT_FOUND"},
	{name: etcdCluster + "MemberUpdate", body: `{"ID":99,"peerURLs":["http://127.0.0.1:1"]}`, allowed: "NOT_FOUND"},
	{name: etcdCluster + "MemberList", body: `{}`, allowed: "OK"},
	{name: etcdCluster + "MemberPromote", body: `{"ID":99}`, allowed: "NOT_FOUND"},
	{name: etcdMaintenance + "Alarm", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "Status", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "Defragment", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "Hash", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "HashKV", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "Snapshot", body: `{}`, allowed: "OK"},
	{name: etcdMaintenance + "MoveLeader", body: `{"targetID":99}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdMaintenance + "Downgrade", body: `{"action":"CANCEL"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "AuthEnable", body: `{}`, allowed: "OK"},
	{name: etcdAuth + "AuthDisable", body: `{}`, allowed: "OK", cleanup: reenableEtcdAuth},
	{name: etcdAuth + "AuthStatus", body: `{}`, allowed: "OK"},
	{name: etcdAuth + "Authenticate", body: `{"name":"root","password":"x"}`, allowed: "INVALID_ARGUMENT"},
	{name: etcdAuth + "UserAdd", body: `{"name":"root","password":"x"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserGet", body: `{"name":"ghost"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserList", body: `{}`, allowed: "OK"},
	{name: etcdAuth + "UserDelete", body: `{"name":"ghost"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserChangePassword", body: `{"name":"ghost","password":"x"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserGrantRole", body: `{"user":"ghost","role":"r"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserRevokeRole", body: `{"name":"ghost","role":"r"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleAdd", body: `{"name":"root"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleGet", body: `{"role":"ghost"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleList", body: `{}`, allowed: "OK"},
	{name: etcdAuth + "RoleDelete", body: `{"role":"ghost"}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleGrantPermission", body: `{"name":"ghost","perm":{"key":"YQ=="}}`, allowed: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleRevokePermission", body: `{"role":"ghost","key":"YQ=="}`, allowed: "FAILED_PRECONDITION"},
}

var deniedInResponse = []exception{{
	[]string{"no token", "unproven", "proven without role", "other project", "other org", "other project, by id", "other org, by id", "org:admin",
		"system:admin", "project:admin", "project:member", "project:viewer", "billing:admin", "service account", "billing:admin of no project"},
	"PERMISSION_DENIED", "a watch is refused within its answer, as in etcd, which has no code there",
}}
