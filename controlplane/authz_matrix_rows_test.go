package main

import "slices"

// This file has the rows of the gRPC methods, except etcd's API, in the order of the .proto files. They are called in
// this order.

const (
	vms            = "/vmcontroller.v1.VmService/"
	images         = "/vmcontroller.v1.ImageService/"
	imageData      = "/storage.v1.ImageDataService/"
	volumes        = "/vmcontroller.v1.VolumeService/"
	nodes          = "/vmcontroller.v1.NodeService/"
	storageClasses = "/storage.v1.StorageClassService/"
	storageVolumes = "/storage.v1.VolumeService/"
	snapshots      = "/storage.v1.SnapshotService/"
	consoles       = "/console.v1.ConsoleService/"
	guests         = "/guest.v1.GuestService/"
	operators      = "/operator.v1.OperatorService/"
	vmViews        = "/operator.v1.VmViewService/"
	instanceTypes  = "/operator.v1.InstanceTypeService/"
)

// webRequest returns a request body that names project web, with the further fields in more.
func webRequest(more string) string { return `{"org_id":"$org","project_id":"$project"` + more + `}` }

// missingVM is a request for a VM that does not exist. In calls by other tenants, $no-vm is replaced by the VM that
// exists.
var missingVM = webRequest(`,"vm_id":"$no-vm"`)

var computeRows = []row{
	{name: vms + "CreateVm", body: webRequest(``), allowed: "INVALID_ARGUMENT"},
	{name: vms + "GetVm", body: webRequest(`,"vm_id":"$vm"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: vms + "ListVms", body: webRequest(``), allowed: "OK"},
	{name: vms + "UpdateVm", body: webRequest(`,"vm_id":"$vm","labels":{"a":"b"}`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: vms + "DeleteVm", body: missingVM, allowed: "NOT_FOUND"},
	{name: vms + "StartVm", body: missingVM, allowed: "NOT_FOUND"},
	{name: vms + "StopVm", body: missingVM, allowed: "NOT_FOUND"},
	{name: vms + "RebootVm", body: missingVM, allowed: "NOT_FOUND"},
	{name: vms + "ResetVm", body: missingVM, allowed: "NOT_FOUND"},
	{name: vms + "MigrateVm", body: webRequest(`,"vm_id":"$vm","destination_node_id":"$uuid"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "PrepareVmMigration", body: webRequest(`,"vm_id":"$vm","listen_uri":"tcp:h:1"`), allowed: "NOT_FOUND"},
	{name: vms + "RecoverVm", body: webRequest(`,"vm_id":"$vm"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "AttachDisk", body: webRequest(`,"vm_id":"$vm","disk":{"id":"d","source":{"volume_id":"$volume"}}`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "DetachDisk", body: webRequest(`,"vm_id":"$vm","disk_id":"d"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "AttachNic", body: webRequest(`,"vm_id":"$vm","nic":{"id":"n"}`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "DetachNic", body: webRequest(`,"vm_id":"$vm","nic_id":"n"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: vms + "WatchVm", body: webRequest(`,"vm_id":"$vm"`), allowed: "OK", otherTenant: "NOT_FOUND"},

	{name: images + "CreateImage", body: `{"org_id":"$org"}`, allowed: "INVALID_ARGUMENT"},
	{name: images + "BeginImageUpload", body: `{"org_id":"$org"}`, allowed: "INVALID_ARGUMENT"},
	{name: images + "UploadImagePart", body: `{"org_id":"$org","image_id":"$image","upload_session_id":"x","part_number":1,"body":"eA=="}`, allowed: "NOT_FOUND"},
	{name: images + "CompleteImageUpload", body: `{"org_id":"$org","image_id":"$image","upload_session_id":"x"}`, allowed: "NOT_FOUND"},
	{name: images + "AbortImageUpload", body: `{"org_id":"$org","image_id":"$image","upload_session_id":"x"}`, allowed: "NOT_FOUND"},
	{name: images + "GetImage", body: `{"org_id":"$org","image_id":"$image"}`, allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: images + "ListImages", body: `{"org_id":"$org"}`, allowed: "OK"},
	{name: images + "UpdateImage", body: `{"org_id":"$org","image_id":"$image","metadata":{"a":"b"}}`, allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: images + "DeleteImage", body: `{"org_id":"$org","image_id":"$no-image"}`, allowed: "NOT_FOUND"},
	{name: imageData + "ListUploadedParts", body: `{"org_id":"$org","image_id":"$image","upload_session_id":"x"}`, allowed: "NOT_FOUND"},
	{name: imageData + "DownloadImage", body: `{"org_id":"$org","image_id":"$no-image"}`, allowed: "NOT_FOUND"},
	{name: imageData + "ListAllImages", body: `{}`, allowed: "OK"},

	{name: volumes + "CreateVolume", body: webRequest(``), allowed: "INVALID_ARGUMENT"},
	{name: volumes + "GetVolume", body: webRequest(`,"volume_id":"$volume"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: volumes + "ListVolumes", body: webRequest(``), allowed: "OK"},
	{name: volumes + "DeleteVolume", body: webRequest(`,"volume_id":"$no-volume"`), allowed: "NOT_FOUND"},
	{name: volumes + "ResizeVolume", body: webRequest(`,"volume_id":"$volume","size_gib":1`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: volumes + "RegisterExternalVolume", body: webRequest(``), allowed: "INVALID_ARGUMENT"},

	{name: storageClasses + "CreateStorageClass", body: `{}`, allowed: "INVALID_ARGUMENT"},
	{name: storageClasses + "GetStorageClass", body: `{"name":"local"}`, allowed: "OK"},
	{name: storageClasses + "ListStorageClasses", body: `{}`, allowed: "OK"},
	{name: storageClasses + "UpdateStorageClass", body: `{"name":"none"}`, allowed: "NOT_FOUND"},
	{name: storageClasses + "DeleteStorageClass", body: `{"name":"none"}`, allowed: "NOT_FOUND"},
	{name: snapshots + "CreateSnapshot", body: webRequest(`,"volume_id":"$volume","name":"s"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: snapshots + "CreateVmSnapshots", body: webRequest(`,"vm_id":"$no-vm","name":"s"`), allowed: "NOT_FOUND"},
	{name: snapshots + "GetSnapshot", body: webRequest(`,"snapshot_id":"$no-volume"`), allowed: "NOT_FOUND"},
	{name: snapshots + "ListSnapshots", body: webRequest(``), allowed: "OK"},
	{name: snapshots + "ListAllSnapshots", body: `{}`, allowed: "OK"},
	{name: snapshots + "UpdateSnapshot", body: webRequest(`,"snapshot_id":"$no-volume","name":"s"`), allowed: "NOT_FOUND"},
	{name: snapshots + "DeleteSnapshot", body: webRequest(`,"snapshot_id":"$no-volume"`), allowed: "NOT_FOUND"},
	{name: snapshots + "ExportSnapshot", body: webRequest(`,"snapshot_id":"$no-volume"`), allowed: "NOT_FOUND"},
	{name: snapshots + "CreateVolumeFromSnapshot", body: webRequest(`,"snapshot_id":"$no-volume","name":"v"`), allowed: "NOT_FOUND"},
	{name: storageVolumes + "UpdateVolume", body: webRequest(`,"volume_id":"$volume"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: storageVolumes + "FlattenVolume", body: webRequest(`,"volume_id":"$volume"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: storageVolumes + "ListAllVolumes", body: `{}`, allowed: "OK"},

	{name: guests + "SetGuestPassword", body: webRequest(`,"vm_id":"$vm","username":"root","password":"secret"`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: guests + "AddGuestSshKeys", body: webRequest(`,"vm_id":"$vm","username":"root","keys":["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ"]`),
		allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},
	{name: guests + "RunGuestCommand", body: webRequest(`,"vm_id":"$vm","command":["true"]`), allowed: "FAILED_PRECONDITION", otherTenant: "NOT_FOUND"},

	{name: nodes + "ListNodes", body: `{}`, allowed: "OK"},
	{name: nodes + "GetNode", body: `{"node_id":"$node"}`, allowed: "OK"},
	{name: nodes + "CordonNode", body: `{"node_id":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: nodes + "UncordonNode", body: `{"node_id":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: nodes + "DrainNode", body: `{"node_id":"$uuid"}`, allowed: "NOT_FOUND"},

	{name: instanceTypes + "CreateInstanceType", body: `{}`, allowed: "INVALID_ARGUMENT"},
	{name: instanceTypes + "GetInstanceType", body: `{"name":"none"}`, allowed: "NOT_FOUND"},
	{name: instanceTypes + "ListInstanceTypes", body: `{}`, allowed: "OK"},
	{name: instanceTypes + "UpdateInstanceType", body: `{"name":"none"}`, allowed: "NOT_FOUND"},
	{name: instanceTypes + "DeleteInstanceType", body: `{"name":"none"}`, allowed: "NOT_FOUND"},

	{name: operators + "ClusterStatus", body: `{}`, allowed: "OK"},
	{name: operators + "CreateNodeToken", body: `{}`, allowed: "OK"},
	{name: operators + "EvictNode", body: `{"nodeId":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: operators + "FenceNode", body: `{"nodeId":"$uuid","confirmedOff":true}`, allowed: "NOT_FOUND"},
	{name: operators + "GetDrain", body: `{"nodeId":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: operators + "CancelDrain", body: `{"nodeId":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: operators + "GetCapacity", body: `{}`, allowed: "OK"},
	{name: operators + "RebalanceCluster", body: `{"dryRun":true}`, allowed: "OK"},
	{name: operators + "BanNode", body: `{"nodeId":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: operators + "UnbanNode", body: `{"nodeId":"$uuid"}`, allowed: "NOT_FOUND"},
	{name: operators + "ListBans", body: `{}`, allowed: "OK"},
	{name: operators + "CreateMemberToken", body: `{}`, allowed: "OK"},
	{name: operators + "AddMember", body: `{}`, allowed: "INVALID_ARGUMENT"},
	{name: operators + "PromoteMember", body: `{"id":99}`, allowed: "FAILED_PRECONDITION"},
	{name: operators + "RemoveMember", body: `{"id":99}`, allowed: "FAILED_PRECONDITION"},
	{name: operators + "ReplaceMember", body: `{"id":99}`, allowed: "FAILED_PRECONDITION"},
	{name: operators + "TransferLeader", body: `{"id":99}`, allowed: "FAILED_PRECONDITION"},
	{name: operators + "BackupCluster", body: `{}`, allowed: "OK", drain: true},
	{name: operators + "ReadConsoleLog", body: missingVM, allowed: "NOT_FOUND"},

	{name: vmViews + "ListAllVms", body: `{}`, allowed: "OK"},
	{name: vmViews + "WatchVms", body: webRequest(``), allowed: "OK"},
	{name: vmViews + "WatchAllVms", body: `{}`, allowed: "OK"},
	{name: vmViews + "GetVmDetails", body: webRequest(`,"vm_id":"$vm"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: operators + "GetMigration", body: missingVM, allowed: "NOT_FOUND"},
	{name: operators + "CancelMigration", body: missingVM, allowed: "NOT_FOUND"},
	{name: operators + "RenameVm", body: webRequest(`,"vm_id":"$vm","name":"renamed"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: consoles + "AttachConsole", body: missingVM, allowed: "NOT_FOUND"},
	{name: consoles + "ReadScreenshot", body: missingVM, allowed: "NOT_FOUND"},
	{name: consoles + "CreateConsoleTicket", body: webRequest(`,"vm_id":"$vm"`), allowed: "OK", otherTenant: "NOT_FOUND"},
}

const identityService = "/identity.v1.IdentityService/"

// inAnOrg is the exception of calls about a group, which must name its org.
var inAnOrg = []exception{{[]string{"system:admin of no project, naming none"}, "INVALID_ARGUMENT", "a group is in an org"}}

var identityRows = []row{
	{name: identityService + "IssueToken", body: `{"username":"view","password":"$secret"}`, allowed: "OK"},
	{name: identityService + "ExchangeToken", body: `{"provider":"none"}`, allowed: "INVALID_ARGUMENT"},
	{name: identityService + "ListLoginProviders", body: `{}`, allowed: "OK"},
	{name: identityService + "VerifyToken", body: `{"token":"garbage"}`, allowed: "OK"},
	{name: identityService + "WhoAmI", body: `{}`, allowed: "OK"},
	{name: identityService + "RevokeToken", body: `{"token":"garbage"}`, allowed: "OK"},
	{name: identityService + "RevokeTokens", body: `{"user_id":"spare"}`, allowed: "OK", exceptions: onlyThemselves},
	{name: identityService + "CreateUser", body: `{"id":"$new"}`, allowed: "OK"},
	{name: identityService + "GetUser", body: `{"id":"spare"}`, allowed: "OK"},
	{name: identityService + "ListUsers", body: `{}`, allowed: "OK"},
	{name: identityService + "UpdateUser", body: `{"user_id":"ghost","name":"Ghost"}`, allowed: "NOT_FOUND"},
	{name: identityService + "DisableUser", body: `{"user_id":"ghost"}`, allowed: "NOT_FOUND"},
	{name: identityService + "EnableUser", body: `{"user_id":"ghost"}`, allowed: "NOT_FOUND"},
	{name: identityService + "DeleteUser", body: `{"user_id":"ghost"}`, allowed: "NOT_FOUND"},
	{name: identityService + "SetPassword", body: `{"user_id":"spare","password":"another-horse"}`, allowed: "OK", exceptions: onlyThemselves},
	{name: identityService + "LinkIdentity", body: `{"user_id":"spare","identity":{"provider":"none","subject":"s"}}`, allowed: "INVALID_ARGUMENT"},
	{name: identityService + "UnlinkIdentity", body: `{"user_id":"spare","identity":{"provider":"none","subject":"s"}}`, allowed: "NOT_FOUND"},

	{name: identityService + "BindRole", body: `{"user_id":"spare","binding":{"role":"project:viewer","org_id":"$org","project_id":"$project"}}`, allowed: "OK"},
	{name: identityService + "UnbindRole", body: `{"user_id":"spare","binding":{"role":"project:viewer","org_id":"$org","project_id":"$project"}}`, allowed: "OK"},
	{name: identityService + "ListBindings", body: webRequest(``), allowed: "OK"},
	{name: identityService + "ListInvitations", body: `{}`, allowed: "OK", exceptions: onlyUsers},
	{name: identityService + "AcceptInvitation", body: `{"binding":{"role":"org:admin","org_id":"nobodys"}}`, allowed: "NOT_FOUND", exceptions: notWithLimitedTokens},
	{name: identityService + "DeclineInvitation", body: `{"binding":{"role":"org:admin","org_id":"nobodys"}}`, allowed: "NOT_FOUND", exceptions: notWithLimitedTokens},

	{name: identityService + "CreateGroup", body: `{"org_id":"$org","id":"$new"}`, allowed: "OK", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "GetGroup", body: `{"org_id":"$org","id":"ghosts"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "ListGroups", body: `{"org_id":"$org"}`, allowed: "OK", tokenScope: "org"},
	{name: identityService + "UpdateGroup", body: `{"org_id":"$org","id":"ghosts","name":"Ghosts"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "DeleteGroup", body: `{"org_id":"$org","id":"ghosts"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "AddGroupMember", body: `{"org_id":"$org","group_id":"ghosts","user_id":"spare"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "RemoveGroupMember", body: `{"org_id":"$org","group_id":"ghosts","user_id":"spare"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "ListGroupMembers", body: `{"org_id":"$org","group_id":"ghosts"}`, allowed: "NOT_FOUND", tokenScope: "org", exceptions: inAnOrg},
	{name: identityService + "CreateServiceAccount", body: webRequest(``), allowed: "INVALID_ARGUMENT"},
	{name: identityService + "ListServiceAccounts", body: webRequest(``), allowed: "OK"},
	{name: identityService + "GetServiceAccount", body: webRequest(`,"id":"$no-account"`), allowed: "NOT_FOUND"},
	{name: identityService + "UpdateServiceAccount", body: webRequest(`,"id":"$no-account"`), allowed: "NOT_FOUND"},
	{name: identityService + "DeleteServiceAccount", body: webRequest(`,"id":"$no-account"`), allowed: "NOT_FOUND"},

	{name: identityService + "CreateOrg", body: `{"id":"$new"}`, allowed: "OK"},
	{name: identityService + "GetOrg", body: `{"id":"$org"}`, allowed: "OK", exceptions: seesTheirs},
	{name: identityService + "ListOrgs", body: `{}`, allowed: "OK"},
	{name: identityService + "UpdateOrg", body: `{"id":"$org","name":"Org"}`, allowed: "OK", tokenScope: "org"},
	{name: identityService + "DeleteOrg", body: `{"id":"$org"}`, allowed: "FAILED_PRECONDITION"},

	{name: identityService + "CreateProject", body: `{"id":"$new","org_id":"$org"}`, allowed: "OK", tokenScope: "org", exceptions: needsOrg},
	{name: identityService + "GetProject", body: `{"id":"$project"}`, allowed: "OK", exceptions: seesTheirProjects},
	{name: identityService + "ListProjects", body: `{}`, allowed: "OK"},
	{name: identityService + "UpdateProject", body: `{"id":"$project","org_id":"$org","name":"Project"}`, allowed: "OK", tokenScope: "org"},
	{name: identityService + "DeleteProject", body: `{"id":"$project","org_id":"$org"}`, allowed: "FAILED_PRECONDITION", tokenScope: "org"},
	{name: identityService + "SetQuota", body: webRequest(``), allowed: "OK"},
	{name: identityService + "GetQuota", body: webRequest(``), allowed: "OK"},
	{name: identityService + "GetDefaultQuota", body: `{}`, allowed: "OK"},
	{name: identityService + "SetDefaultQuota", body: `{"quota":{"snapshots":9999}}`, allowed: "OK"},

	{name: identityService + "ListKeys", body: `{}`, allowed: "OK"},
	{name: identityService + "RotateKeys", body: `{}`, allowed: "FAILED_PRECONDITION"},
	{name: identityService + "RevokeKey", body: `{"key_id":"0000000000000000"}`, allowed: "NOT_FOUND"},

	{name: identityService + "ListAuditRecords", body: `{"org_id":"$org"}`, allowed: "OK", tokenScope: "org"},

	{name: nodes + "HeartbeatNode", body: `{}`, allowed: "PERMISSION_DENIED"},
	{name: "/grpc.health.v1.Health/Check", body: `{}`, allowed: "OK"},
	{name: "/grpc.health.v1.Health/List", body: `{}`, allowed: "OK"},
	{name: "/grpc.health.v1.Health/Watch", body: `{}`, allowed: "OK"},
	{name: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", body: `{"list_services":""}`, allowed: "OK"},
	{name: "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", body: `{"list_services":""}`, allowed: "OK"},
}

var onlyUsers = []exception{{[]string{"service account"}, "PERMISSION_DENIED", "only users are invited"}}

var onlyThemselves = []exception{{
	append([]string{"billing:admin of no project"}, limitedTokens...), "PERMISSION_DENIED", "users may do this to themselves only, and it is about another",
}}

// limitedTokens lists the columns of the authorization matrix whose tokens are valid and limited to a project or an
// org.
var limitedTokens = []string{
	"proven without role", "system:admin", "other project", "other org", "other project, by id", "other org, by id", "org:admin", "project:admin",
	"project:member", "project:viewer", "billing:admin", "service account",
}

var seesTheirs = []exception{{
	[]string{"proven without role", "other org", "other org, by id"}, "NOT_FOUND", "it shows what the caller has a role in",
}}

var seesTheirProjects = append(slices.Clone(seesTheirs), exception{
	[]string{"other project", "other project, by id"}, "NOT_FOUND", "that org's other project is not the caller's",
})

var needsOrg = []exception{{
	[]string{"system:admin of no project, naming none"}, "INVALID_ARGUMENT", "a project is made in an org",
}}

var notWithLimitedTokens = []exception{{
	limitedTokens, "PERMISSION_DENIED", "with a token of a part, its holder neither gets further roles nor refuses them",
}}

const credits = "/credit.v1.CreditService/"

var creditRows = []row{
	{name: credits + "CreateWallet", body: webRequest(``), allowed: "ALREADY_EXISTS"},
	{name: credits + "GetWallet", body: webRequest(``), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "ListWallets", body: `{}`, allowed: "OK"},
	{name: credits + "TopUpWallet", body: webRequest(`,"amount":5`), allowed: "OK"},
	{name: credits + "ChargeWallet", body: webRequest(`,"amount":1`), allowed: "OK"},
	{name: credits + "RefundCharge", body: webRequest(`,"amount":1,"charge_sequence":1`), allowed: "FAILED_PRECONDITION"},
	{name: credits + "SuspendWallet", body: webRequest(``), allowed: "OK"},
	{name: credits + "ResumeWallet", body: webRequest(``), allowed: "OK"},
	{name: credits + "CloseWallet", body: webRequest(``), allowed: "FAILED_PRECONDITION"},
	{name: credits + "ListTransactions", body: webRequest(``), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "WatchTransactions", body: webRequest(``), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "GetStatement", body: webRequest(``), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "CreateReservation", body: webRequest(`,"amount":1`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "GetReservation", body: webRequest(`,"reservation_id":"$reservation"`), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "ListReservations", body: webRequest(``), allowed: "OK", otherTenant: "NOT_FOUND"},
	{name: credits + "CommitReservation", body: webRequest(`,"reservation_id":"$no-reservation"`), allowed: "NOT_FOUND"},
	{name: credits + "ReleaseReservation", body: webRequest(`,"reservation_id":"$no-reservation"`), allowed: "NOT_FOUND"},
	{name: credits + "AuditLedger", body: `{}`, allowed: "OK"},
}
