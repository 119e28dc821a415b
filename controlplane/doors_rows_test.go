package main

// The rows of gRPC, but for etcd's. They stand in the order of the protos, in which they are called.

const (
	vms       = "/vmcontroller.v1.VmService/"
	images    = "/vmcontroller.v1.ImageService/"
	volumes   = "/vmcontroller.v1.VolumeService/"
	nodes     = "/vmcontroller.v1.NodeService/"
	operators = "/operator.v1.OperatorService/"
)

// in is a request about project web; more are further fields.
func in(more string) string { return `{"org_id":"$org","project_id":"$project"` + more + `}` }

// aVM is a request about a VM that is not there, or for others about the one that is.
var aVM = in(`,"vm_id":"$no-vm"`)

var machineRows = []row{
	{name: vms + "CreateVm", ask: in(``), right: "INVALID_ARGUMENT"},
	{name: vms + "GetVm", ask: in(`,"vm_id":"$vm"`), right: "OK", own: "NOT_FOUND"},
	{name: vms + "ListVms", ask: in(``), right: "OK"},
	{name: vms + "UpdateVm", ask: in(`,"vm_id":"$vm","labels":{"a":"b"}`), right: "OK", own: "NOT_FOUND"},
	{name: vms + "DeleteVm", ask: aVM, right: "NOT_FOUND"},
	{name: vms + "StartVm", ask: aVM, right: "NOT_FOUND"},
	{name: vms + "StopVm", ask: aVM, right: "NOT_FOUND"},
	{name: vms + "RebootVm", ask: aVM, right: "NOT_FOUND"},
	{name: vms + "ResetVm", ask: aVM, right: "NOT_FOUND"},
	{name: vms + "MigrateVm", ask: in(`,"vm_id":"$vm","destination_node_id":"$uuid"`), right: "UNIMPLEMENTED", own: "NOT_FOUND"},
	{name: vms + "PrepareVmMigration", ask: in(`,"vm_id":"$vm","listen_uri":"tcp:h:1"`), right: "UNIMPLEMENTED"},
	{name: vms + "RecoverVm", ask: in(`,"vm_id":"$vm"`), right: "UNIMPLEMENTED"},
	{name: vms + "AttachDisk", ask: in(`,"vm_id":"$vm","disk":{"id":"d","size_gib":1,"source":{"blank":true}}`), right: "UNIMPLEMENTED", own: "NOT_FOUND"},
	{name: vms + "DetachDisk", ask: in(`,"vm_id":"$vm","disk_id":"d"`), right: "UNIMPLEMENTED", own: "NOT_FOUND"},
	{name: vms + "AttachNic", ask: in(`,"vm_id":"$vm","nic":{"id":"n"}`), right: "UNIMPLEMENTED", own: "NOT_FOUND"},
	{name: vms + "DetachNic", ask: in(`,"vm_id":"$vm","nic_id":"n"`), right: "UNIMPLEMENTED", own: "NOT_FOUND"},
	{name: vms + "WatchVm", ask: in(`,"vm_id":"$vm"`), right: "OK", own: "NOT_FOUND"},

	{name: images + "CreateImage", ask: `{"org_id":"$org"}`, right: "INVALID_ARGUMENT"},
	{name: images + "BeginImageUpload", ask: `{"org_id":"$org"}`, right: "INVALID_ARGUMENT"},
	{name: images + "UploadImagePart", ask: `{"org_id":"$org"}`, right: "INVALID_ARGUMENT"},
	{name: images + "CompleteImageUpload", ask: `{"org_id":"$org"}`, right: "INVALID_ARGUMENT"},
	{name: images + "AbortImageUpload", ask: `{"org_id":"$org"}`, right: "INVALID_ARGUMENT"},
	{name: images + "GetImage", ask: `{"org_id":"$org","image_id":"$image"}`, right: "OK", own: "NOT_FOUND"},
	{name: images + "ListImages", ask: `{"org_id":"$org"}`, right: "OK"},
	{name: images + "UpdateImage", ask: `{"org_id":"$org","image_id":"$image","metadata":{"a":"b"}}`, right: "OK", own: "NOT_FOUND"},
	{name: images + "DeleteImage", ask: `{"org_id":"$org","image_id":"$no-image"}`, right: "NOT_FOUND"},

	{name: volumes + "CreateVolume", ask: in(``), right: "INVALID_ARGUMENT"},
	{name: volumes + "GetVolume", ask: in(`,"volume_id":"$uuid"`), right: "UNIMPLEMENTED"},
	{name: volumes + "ListVolumes", ask: in(``), right: "UNIMPLEMENTED"},
	{name: volumes + "DeleteVolume", ask: in(`,"volume_id":"$uuid"`), right: "UNIMPLEMENTED"},
	{name: volumes + "ResizeVolume", ask: in(`,"volume_id":"$uuid","size_gib":1`), right: "UNIMPLEMENTED"},
	{name: volumes + "RegisterExternalVolume", ask: in(``), right: "INVALID_ARGUMENT"},

	{name: nodes + "ListNodes", ask: `{}`, right: "OK"},
	{name: nodes + "GetNode", ask: `{"node_id":"$node"}`, right: "OK"},
	{name: nodes + "CordonNode", ask: `{"node_id":"$uuid"}`, right: "NOT_FOUND"},
	{name: nodes + "UncordonNode", ask: `{"node_id":"$uuid"}`, right: "NOT_FOUND"},
	{name: nodes + "DrainNode", ask: `{"node_id":"$uuid"}`, right: "UNIMPLEMENTED"},

	{name: operators + "ClusterStatus", ask: `{}`, right: "OK"},
	{name: operators + "CreateNodeToken", ask: `{}`, right: "OK"},
	{name: operators + "EvictNode", ask: `{"nodeId":"$uuid"}`, right: "NOT_FOUND"},
	{name: operators + "BanNode", ask: `{"nodeId":"$uuid"}`, right: "NOT_FOUND"},
	{name: operators + "UnbanNode", ask: `{"nodeId":"$uuid"}`, right: "NOT_FOUND"},
	{name: operators + "ListBans", ask: `{}`, right: "OK"},
	{name: operators + "CreateMemberToken", ask: `{}`, right: "OK"},
	{name: operators + "AddMember", ask: `{}`, right: "INVALID_ARGUMENT"},
	{name: operators + "PromoteMember", ask: `{"id":99}`, right: "FAILED_PRECONDITION"},
	{name: operators + "RemoveMember", ask: `{"id":99}`, right: "FAILED_PRECONDITION"},
	{name: operators + "ReplaceMember", ask: `{"id":99}`, right: "FAILED_PRECONDITION"},
	{name: operators + "TransferLeader", ask: `{"id":99}`, right: "FAILED_PRECONDITION"},
	{name: operators + "BackupCluster", ask: `{}`, right: "OK", drain: true},
	{name: operators + "ReadConsoleLog", ask: aVM, right: "NOT_FOUND"},
}

const identityService = "/identity.v1.IdentityService/"

var identityRows = []row{
	{name: identityService + "IssueToken", ask: `{"username":"view","password":"$secret"}`, right: "OK"},
	{name: identityService + "ExchangeToken", ask: `{"provider":"none"}`, right: "INVALID_ARGUMENT"},
	{name: identityService + "ListLoginProviders", ask: `{}`, right: "OK"},
	{name: identityService + "VerifyToken", ask: `{"token":"garbage"}`, right: "OK"},
	{name: identityService + "WhoAmI", ask: `{}`, right: "OK"},
	{name: identityService + "RevokeToken", ask: `{"token":"garbage"}`, right: "OK"},
	{name: identityService + "RevokeTokens", ask: `{"user_id":"spare"}`, right: "OK", but: onlyThemselves},
	{name: identityService + "CreateUser", ask: `{"id":"$new"}`, right: "OK"},
	{name: identityService + "GetUser", ask: `{"id":"spare"}`, right: "OK"},
	{name: identityService + "ListUsers", ask: `{}`, right: "OK"},
	{name: identityService + "DisableUser", ask: `{"user_id":"ghost"}`, right: "NOT_FOUND"},
	{name: identityService + "EnableUser", ask: `{"user_id":"ghost"}`, right: "NOT_FOUND"},
	{name: identityService + "DeleteUser", ask: `{"user_id":"ghost"}`, right: "NOT_FOUND"},
	{name: identityService + "SetPassword", ask: `{"user_id":"spare","password":"another-horse"}`, right: "OK", but: onlyThemselves},
	{name: identityService + "LinkIdentity", ask: `{"user_id":"spare","identity":{"provider":"none","subject":"s"}}`, right: "INVALID_ARGUMENT"},
	{name: identityService + "UnlinkIdentity", ask: `{"user_id":"spare","identity":{"provider":"none","subject":"s"}}`, right: "NOT_FOUND"},

	{name: identityService + "BindRole", ask: `{"user_id":"spare","binding":{"role":"project:viewer","org_id":"$org","project_id":"$project"}}`, right: "OK"},
	{name: identityService + "UnbindRole", ask: `{"user_id":"spare","binding":{"role":"project:viewer","org_id":"$org","project_id":"$project"}}`, right: "OK"},
	{name: identityService + "ListBindings", ask: in(``), right: "OK"},
	{name: identityService + "ListInvitations", ask: `{}`, right: "OK", but: onlyUsers},
	{name: identityService + "AcceptInvitation", ask: `{"binding":{"role":"org:admin","org_id":"nobodys"}}`, right: "NOT_FOUND", but: []exception{{
		onlyThemselves[0].columns, "PERMISSION_DENIED", "a token of a part does not add to what its holder can do",
	}}},
	{name: identityService + "DeclineInvitation", ask: `{"binding":{"role":"org:admin","org_id":"nobodys"}}`, right: "NOT_FOUND", but: []exception{{
		onlyThemselves[0].columns, "PERMISSION_DENIED", "a token of a part does not hide what its holder is offered",
	}}},

	{name: identityService + "CreateServiceAccount", ask: in(``), right: "INVALID_ARGUMENT"},
	{name: identityService + "ListServiceAccounts", ask: in(``), right: "OK"},
	{name: identityService + "DeleteServiceAccount", ask: in(`,"id":"$no-account"`), right: "NOT_FOUND"},

	{name: identityService + "CreateOrg", ask: `{"id":"$new"}`, right: "OK"},
	{name: identityService + "GetOrg", ask: `{"id":"$org"}`, right: "OK", but: seesTheirs},
	{name: identityService + "ListOrgs", ask: `{}`, right: "OK"},
	{name: identityService + "DeleteOrg", ask: `{"id":"$org"}`, right: "FAILED_PRECONDITION"},

	{name: identityService + "CreateProject", ask: `{"id":"$new","org_id":"$org"}`, right: "OK", at: "org", but: []exception{{
		[]string{"system:admin of no project, naming none"}, "INVALID_ARGUMENT", "a project is made in an org",
	}}},
	{name: identityService + "GetProject", ask: `{"id":"$project"}`, right: "OK", but: append(seesTheirs, exception{
		[]string{"other project", "other project, by id"}, "NOT_FOUND", "that org's other project is not the caller's",
	})},
	{name: identityService + "ListProjects", ask: `{}`, right: "OK"},
	{name: identityService + "DeleteProject", ask: `{"id":"$project","org_id":"$org"}`, right: "FAILED_PRECONDITION", at: "org"},
	{name: identityService + "SetQuota", ask: in(``), right: "OK"},
	{name: identityService + "GetQuota", ask: in(``), right: "OK"},

	{name: identityService + "ListKeys", ask: `{}`, right: "OK"},
	{name: identityService + "RotateKeys", ask: `{}`, right: "FAILED_PRECONDITION"},
	{name: identityService + "RevokeKey", ask: `{"key_id":"0000000000000000"}`, right: "NOT_FOUND"},

	{name: identityService + "ListAuditRecords", ask: `{"org_id":"$org"}`, right: "OK", at: "org"},

	{name: nodes + "HeartbeatNode", ask: `{}`, right: "PERMISSION_DENIED"},
	{name: "/grpc.health.v1.Health/Check", ask: `{}`, right: "OK"},
	{name: "/grpc.health.v1.Health/List", ask: `{}`, right: "OK"},
	{name: "/grpc.health.v1.Health/Watch", ask: `{}`, right: "OK"},
	{name: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", ask: `{"list_services":""}`, right: "OK"},
	{name: "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", ask: `{"list_services":""}`, right: "OK"},
}

var onlyUsers = []exception{{[]string{"service account"}, "PERMISSION_DENIED", "only users are invited"}}

var onlyThemselves = []exception{{
	[]string{"proven without role", "system:admin", "other project", "other org", "other project, by id", "other org, by id", "org:admin", "project:admin",
		"project:member", "project:viewer", "billing:admin", "service account"},
	"PERMISSION_DENIED", "users may do this to themselves only, and it is about another",
}}

var seesTheirs = []exception{{
	[]string{"proven without role", "other org", "other org, by id"}, "NOT_FOUND", "it shows what the caller has a role in",
}}

const credits = "/credit.v1.CreditService/"

var creditRows = []row{
	{name: credits + "CreateWallet", ask: in(``), right: "ALREADY_EXISTS"},
	{name: credits + "GetWallet", ask: in(``), right: "OK", own: "NOT_FOUND"},
	{name: credits + "ListWallets", ask: `{}`, right: "OK"},
	{name: credits + "TopUpWallet", ask: in(`,"amount":5`), right: "OK"},
	{name: credits + "ChargeWallet", ask: in(`,"amount":1`), right: "OK"},
	{name: credits + "RefundCharge", ask: in(`,"amount":1,"charge_sequence":1`), right: "FAILED_PRECONDITION"},
	{name: credits + "SuspendWallet", ask: in(``), right: "OK"},
	{name: credits + "ResumeWallet", ask: in(``), right: "OK"},
	{name: credits + "CloseWallet", ask: in(``), right: "FAILED_PRECONDITION"},
	{name: credits + "ListTransactions", ask: in(``), right: "OK", own: "NOT_FOUND"},
	{name: credits + "WatchTransactions", ask: in(``), right: "OK", own: "NOT_FOUND"},
	{name: credits + "GetStatement", ask: in(``), right: "OK", own: "NOT_FOUND"},
	{name: credits + "CreateReservation", ask: in(`,"amount":1`), right: "OK", own: "NOT_FOUND"},
	{name: credits + "GetReservation", ask: in(`,"reservation_id":"$reservation"`), right: "OK", own: "NOT_FOUND"},
	{name: credits + "ListReservations", ask: in(``), right: "OK", own: "NOT_FOUND"},
	{name: credits + "CommitReservation", ask: in(`,"reservation_id":"$no-reservation"`), right: "NOT_FOUND"},
	{name: credits + "ReleaseReservation", ask: in(`,"reservation_id":"$no-reservation"`), right: "NOT_FOUND"},
	{name: credits + "AuditLedger", ask: `{}`, right: "OK"},
}
