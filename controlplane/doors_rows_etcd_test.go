package main

const (
	etcdKV          = "/etcdserverpb.KV/"
	etcdLease       = "/etcdserverpb.Lease/"
	etcdCluster     = "/etcdserverpb.Cluster/"
	etcdMaintenance = "/etcdserverpb.Maintenance/"
	etcdAuth        = "/etcdserverpb.Auth/"
)

// etcdRows are those of etcd's own API, with its Auth enabled, for callers on loopback. Bytes are in base64: YQ== is a.
var etcdRows = []row{
	{name: etcdKV + "Range", ask: `{"key":"YQ=="}`, right: "OK"},
	{name: etcdKV + "RangeStream", ask: `{"key":"YQ=="}`, right: "OK"},
	{name: etcdKV + "Put", ask: `{"key":"YQ=="}`, right: "OK"},
	{name: etcdKV + "DeleteRange", ask: `{"key":"Yg=="}`, right: "OK"},
	{name: etcdKV + "Txn", ask: `{"success":[{"request_range":{"key":"YQ=="}}]}`, right: "OK"},
	{name: etcdKV + "Compact", ask: `{"revision":1000000}`, right: "OUT_OF_RANGE"},
	{name: "/etcdserverpb.Watch/Watch", ask: `{"create_request":{"key":"YQ=="}}`, right: "OK", but: inTheAnswer},
	{name: etcdLease + "LeaseGrant", ask: `{"TTL":60}`, right: "OK"},
	{name: etcdLease + "LeaseRevoke", ask: `{"ID":7}`, right: "NOT_FOUND"},
	{name: etcdLease + "LeaseKeepAlive", ask: `{"ID":7}`, right: "OK"},
	{name: etcdLease + "LeaseTimeToLive", ask: `{"ID":7}`, right: "OK"},
	{name: etcdLease + "LeaseLeases", ask: `{}`, right: "OK"},
	{name: etcdCluster + "MemberAdd", ask: `{"peerURLs":["$peer"]}`, right: "FAILED_PRECONDITION"},
	{name: etcdCluster + "MemberRemove", ask: `{"ID":99}`, right: "NOT_FOUND"},
	{name: etcdCluster + "MemberUpdate", ask: `{"ID":99,"peerURLs":["http://127.0.0.1:1"]}`, right: "NOT_FOUND"},
	{name: etcdCluster + "MemberList", ask: `{}`, right: "OK"},
	{name: etcdCluster + "MemberPromote", ask: `{"ID":99}`, right: "NOT_FOUND"},
	{name: etcdMaintenance + "Alarm", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "Status", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "Defragment", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "Hash", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "HashKV", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "Snapshot", ask: `{}`, right: "OK"},
	{name: etcdMaintenance + "MoveLeader", ask: `{"targetID":99}`, right: "FAILED_PRECONDITION"},
	{name: etcdMaintenance + "Downgrade", ask: `{"action":"CANCEL"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "AuthEnable", ask: `{}`, right: "OK"},
	{name: etcdAuth + "AuthDisable", ask: `{}`, right: "OK", then: enableAgain},
	{name: etcdAuth + "AuthStatus", ask: `{}`, right: "OK", asks: "no token"},
	{name: etcdAuth + "Authenticate", ask: `{"name":"root","password":"x"}`, right: "INVALID_ARGUMENT", asks: "nothing"},
	{name: etcdAuth + "UserAdd", ask: `{"name":"root","password":"x"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserGet", ask: `{"name":"ghost"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserList", ask: `{}`, right: "OK"},
	{name: etcdAuth + "UserDelete", ask: `{"name":"ghost"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserChangePassword", ask: `{"name":"ghost","password":"x"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserGrantRole", ask: `{"user":"ghost","role":"r"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "UserRevokeRole", ask: `{"name":"ghost","role":"r"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleAdd", ask: `{"name":"root"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleGet", ask: `{"role":"ghost"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleList", ask: `{}`, right: "OK"},
	{name: etcdAuth + "RoleDelete", ask: `{"role":"ghost"}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleGrantPermission", ask: `{"name":"ghost","perm":{"key":"YQ=="}}`, right: "FAILED_PRECONDITION"},
	{name: etcdAuth + "RoleRevokePermission", ask: `{"role":"ghost","key":"YQ=="}`, right: "FAILED_PRECONDITION"},
}

var inTheAnswer = []exception{{
	[]string{"no token", "unproven", "proven without role", "other project", "other org", "other project, by id", "other org, by id", "org:admin",
		"system:admin", "project:admin", "project:member", "project:viewer", "billing:admin", "service account"},
	"PERMISSION_DENIED", "a watch is refused within its answer, as in etcd, which has no code there",
}}
