package auth

import (
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Method is the full name of a gRPC method, such as /vmcontroller.v1.VmService/GetVm. Each REST route is authorized as
// one of these methods.
type Method string

// verb returns the method's name without its service, such as GetVm, for messages.
func (m Method) verb() string { return string(m[strings.LastIndexByte(string(m), '/')+1:]) }

// Scope states on which kind of tenant (the cloud, an org or a project) a method acts, and how a call names the tenant.
type Scope uint8

const (
	// Nowhere is for methods that concern the entire cloud and have no tenant.
	Nowhere Scope = iota
	OfOrg
	OfProject
	// OfNamedProject is for methods whose request names the project, on REST too. A caller who may act in every project
	// needs no token for that project and need not name its org, because project IDs are unique in the cloud.
	OfNamedProject
	// OfPlace is for methods whose request names an org or a project, or names neither to act on the entire cloud. What
	// the request names must be within the token's scope.
	OfPlace
	// OfProjectOrOrg is treated as OfPlace if the request names an org and no project, and as OfNamedProject otherwise.
	OfProjectOrOrg
)

// Rule states who may call a method: callers with one of Roles in the method's tenant, and callers with the role
// system:admin.
type Rule struct {
	Scope Scope
	Roles []cloud.Role
}

var (
	read  = []cloud.Role{cloud.OrgAdmin, cloud.ProjectAdmin, cloud.ProjectMember, cloud.ProjectViewer}
	write = []cloud.Role{cloud.OrgAdmin, cloud.ProjectAdmin, cloud.ProjectMember}
	// bill lists the roles for methods that create or remove credit. Tenants must not call these methods.
	bill = []cloud.Role{cloud.BillingAdmin}
	// govern lists the roles for methods that manage an org. manage lists the roles for methods that manage a project.
	govern = []cloud.Role{cloud.OrgAdmin}
	manage = []cloud.Role{cloud.OrgAdmin, cloud.ProjectAdmin}
	look   = append([]cloud.Role{cloud.BillingAdmin}, read...)
)

const (
	vms            = "/vmcontroller.v1.VmService/"
	images         = "/vmcontroller.v1.ImageService/"
	imageData      = "/storage.v1.ImageDataService/"
	volumes        = "/vmcontroller.v1.VolumeService/"
	consoles       = "/console.v1.ConsoleService/"
	nodes          = "/vmcontroller.v1.NodeService/"
	guests         = "/guest.v1.GuestService/"
	storageVolumes = "/storage.v1.VolumeService/"
	storageClasses = "/storage.v1.StorageClassService/"
	snapshots      = "/storage.v1.SnapshotService/"
	operators      = "/operator.v1.OperatorService/"
	vmViews        = "/operator.v1.VmViewService/"
	instanceTypes  = "/operator.v1.InstanceTypeService/"
	identity       = "/identity.v1.IdentityService/"
	credits        = "/credit.v1.CreditService/"
	networks       = "/network.v1.NetworkService/"
)

// rules is the authorization table: the roles that may call each method. Admit refuses a method that is not listed. The
// methods in Open, health and reflection need no rule, because they do not call Admit. A rule with nil roles admits
// only system:admin. A rule with anyProven admits every authenticated caller.
var rules = map[Method]Rule{
	vms + "CreateVm":           {OfProject, write},
	vms + "GetVm":              {OfProject, read},
	vms + "ListVms":            {OfProject, read},
	vms + "UpdateVm":           {OfProject, write},
	vms + "DeleteVm":           {OfProject, write},
	vms + "StartVm":            {OfProject, write},
	vms + "StopVm":             {OfProject, write},
	vms + "RebootVm":           {OfProject, write},
	vms + "ResetVm":            {OfProject, write},
	vms + "MigrateVm":          {OfProject, write},
	vms + "PrepareVmMigration": {OfProject, nil},
	vms + "RecoverVm":          {OfProject, write},
	vms + "AttachDisk":         {OfProject, write},
	vms + "DetachDisk":         {OfProject, write},
	vms + "AttachNic":          {OfProject, write},
	vms + "DetachNic":          {OfProject, write},
	vms + "WatchVm":            {OfProject, read},

	guests + "SetGuestPassword": {OfProject, write},
	guests + "AddGuestSshKeys":  {OfProject, write},
	guests + "RunGuestCommand":  {OfProject, write},

	images + "CreateImage":         {OfOrg, write},
	images + "BeginImageUpload":    {OfOrg, write},
	images + "UploadImagePart":     {OfOrg, write},
	images + "CompleteImageUpload": {OfOrg, write},
	images + "AbortImageUpload":    {OfOrg, write},
	images + "GetImage":            {OfOrg, read},
	images + "ListImages":          {OfOrg, read},
	images + "UpdateImage":         {OfOrg, write},
	images + "DeleteImage":         {OfOrg, write},

	imageData + "ListUploadedParts": {OfOrg, write},
	imageData + "DownloadImage":     {OfOrg, read},
	imageData + "ListAllImages":     {Nowhere, nil},

	volumes + "CreateVolume":           {OfProject, write},
	volumes + "GetVolume":              {OfProject, read},
	volumes + "ListVolumes":            {OfProject, read},
	volumes + "DeleteVolume":           {OfProject, write},
	volumes + "ResizeVolume":           {OfProject, write},
	volumes + "RegisterExternalVolume": {OfProject, nil},

	storageVolumes + "UpdateVolume":   {OfProject, write},
	storageVolumes + "FlattenVolume":  {OfProject, write},
	storageVolumes + "ListAllVolumes": {Nowhere, nil},

	snapshots + "CreateSnapshot":           {OfProject, write},
	snapshots + "CreateVmSnapshots":        {OfProject, write},
	snapshots + "GetSnapshot":              {OfProject, read},
	snapshots + "ListSnapshots":            {OfProject, read},
	snapshots + "ListAllSnapshots":         {Nowhere, nil},
	snapshots + "UpdateSnapshot":           {OfProject, write},
	snapshots + "DeleteSnapshot":           {OfProject, write},
	snapshots + "CreateVolumeFromSnapshot": {OfProject, write},
	snapshots + "ExportSnapshot":           {OfProject, write},

	storageClasses + "CreateStorageClass": {Nowhere, nil},
	storageClasses + "GetStorageClass":    {Nowhere, anyProven},
	storageClasses + "ListStorageClasses": {Nowhere, anyProven},
	storageClasses + "UpdateStorageClass": {Nowhere, nil},
	storageClasses + "DeleteStorageClass": {Nowhere, nil},

	instanceTypes + "CreateInstanceType": {Nowhere, nil},
	instanceTypes + "GetInstanceType":    {Nowhere, anyProven},
	instanceTypes + "ListInstanceTypes":  {Nowhere, anyProven},
	instanceTypes + "UpdateInstanceType": {Nowhere, nil},
	instanceTypes + "DeleteInstanceType": {Nowhere, nil},

	networks + "CreateVpc":               {OfProject, write},
	networks + "GetVpc":                  {OfProject, read},
	networks + "ListVpcs":                {OfProject, read},
	networks + "ListAllVpcs":             {Nowhere, nil},
	networks + "UpdateVpc":               {OfProject, write},
	networks + "DeleteVpc":               {OfProject, write},
	networks + "CreateSubnet":            {OfProject, write},
	networks + "GetSubnet":               {OfProject, read},
	networks + "ListSubnets":             {OfProject, read},
	networks + "ListAllSubnets":          {Nowhere, nil},
	networks + "UpdateSubnet":            {OfProject, write},
	networks + "DeleteSubnet":            {OfProject, write},
	networks + "CreatePort":              {OfProject, write},
	networks + "GetPort":                 {OfProject, read},
	networks + "ListPorts":               {OfProject, read},
	networks + "ListAllPorts":            {Nowhere, nil},
	networks + "UpdatePort":              {OfProject, write},
	networks + "DeletePort":              {OfProject, write},
	networks + "CreateSecurityGroup":     {OfProject, write},
	networks + "GetSecurityGroup":        {OfProject, read},
	networks + "ListSecurityGroups":      {OfProject, read},
	networks + "ListAllSecurityGroups":   {Nowhere, nil},
	networks + "UpdateSecurityGroup":     {OfProject, write},
	networks + "DeleteSecurityGroup":     {OfProject, write},
	networks + "AddSecurityGroupRule":    {OfProject, write},
	networks + "RemoveSecurityGroupRule": {OfProject, write},
	networks + "CreateRouteTable":        {OfProject, write},
	networks + "GetRouteTable":           {OfProject, read},
	networks + "ListRouteTables":         {OfProject, read},
	networks + "ListAllRouteTables":      {Nowhere, nil},
	networks + "UpdateRouteTable":        {OfProject, write},
	networks + "DeleteRouteTable":        {OfProject, write},
	networks + "CreateNatGateway":        {OfProject, write},
	networks + "GetNatGateway":           {OfProject, read},
	networks + "ListNatGateways":         {OfProject, read},
	networks + "ListAllNatGateways":      {Nowhere, nil},
	networks + "UpdateNatGateway":        {OfProject, write},
	networks + "DeleteNatGateway":        {OfProject, write},
	networks + "CreateFloatingIp":        {OfProject, write},
	networks + "GetFloatingIp":           {OfProject, read},
	networks + "ListFloatingIps":         {OfProject, read},
	networks + "ListAllFloatingIps":      {Nowhere, nil},
	networks + "UpdateFloatingIp":        {OfProject, write},
	networks + "DeleteFloatingIp":        {OfProject, write},
	networks + "CreateServiceIp":         {OfProject, write},
	networks + "GetServiceIp":            {OfProject, read},
	networks + "ListServiceIps":          {OfProject, read},
	networks + "ListAllServiceIps":       {Nowhere, nil},
	networks + "UpdateServiceIp":         {OfProject, write},
	networks + "DeleteServiceIp":         {OfProject, write},
	networks + "CreatePeering":           {OfProject, write},
	networks + "AcceptPeering":           {OfProject, write},
	networks + "GetPeering":              {OfProject, read},
	networks + "ListPeerings":            {OfProject, read},
	networks + "ListAllPeerings":         {Nowhere, nil},
	networks + "UpdatePeering":           {OfProject, write},
	networks + "DeletePeering":           {OfProject, write},
	networks + "CreateExternalNetwork":   {Nowhere, nil},
	networks + "GetExternalNetwork":      {Nowhere, anyProven},
	networks + "ListExternalNetworks":    {Nowhere, anyProven},
	networks + "UpdateExternalNetwork":   {Nowhere, nil},
	networks + "DeleteExternalNetwork":   {Nowhere, nil},
	networks + "ExplainPath":             {OfProject, read},

	// Every authenticated caller may read some fields of a node; the handler returns the other fields only to
	// system:admin.
	nodes + "ListNodes":    {Nowhere, anyProven},
	nodes + "GetNode":      {Nowhere, anyProven},
	nodes + "CordonNode":   {Nowhere, nil},
	nodes + "UncordonNode": {Nowhere, nil},
	nodes + "DrainNode":    {Nowhere, nil},

	consoles + "AttachConsole":       {OfProject, write},
	consoles + "ReadScreenshot":      {OfProject, read},
	consoles + "CreateConsoleTicket": {OfProject, write},

	operators + "ClusterStatus":     {Nowhere, nil},
	operators + "CreateNodeToken":   {Nowhere, nil},
	operators + "EvictNode":         {Nowhere, nil},
	operators + "FenceNode":         {Nowhere, nil},
	operators + "GetDrain":          {Nowhere, nil},
	operators + "CancelDrain":       {Nowhere, nil},
	operators + "GetCapacity":       {Nowhere, nil},
	operators + "RebalanceCluster":  {Nowhere, nil},
	operators + "BanNode":           {Nowhere, nil},
	operators + "UnbanNode":         {Nowhere, nil},
	operators + "ListBans":          {Nowhere, nil},
	operators + "CreateMemberToken": {Nowhere, nil},
	operators + "AddMember":         {Nowhere, nil},
	operators + "PromoteMember":     {Nowhere, nil},
	operators + "RemoveMember":      {Nowhere, nil},
	operators + "ReplaceMember":     {Nowhere, nil},
	operators + "TransferLeader":    {Nowhere, nil},
	operators + "BackupCluster":     {Nowhere, nil},
	operators + "ReadConsoleLog":    {OfProject, read},
	operators + "GetMigration":      {OfProject, read},
	operators + "CancelMigration":   {OfProject, write},
	operators + "RenameVm":          {OfProject, write},

	vmViews + "ListAllVms":   {Nowhere, nil},
	vmViews + "WatchVms":     {OfProject, read},
	vmViews + "WatchAllVms":  {Nowhere, nil},
	vmViews + "GetVmDetails": {OfProject, read},

	// Every authenticated caller may call these methods; the handlers let users act only on themselves.
	identity + "WhoAmI":       {Nowhere, anyProven},
	identity + "SetPassword":  {Nowhere, anyProven},
	identity + "RevokeToken":  {Nowhere, anyProven},
	identity + "RevokeTokens": {Nowhere, anyProven},
	// These methods return only orgs and projects in which the caller has a role.
	identity + "GetOrg":       {Nowhere, anyProven},
	identity + "ListOrgs":     {Nowhere, anyProven},
	identity + "GetProject":   {Nowhere, anyProven},
	identity + "ListProjects": {Nowhere, anyProven},

	identity + "CreateUser":     {Nowhere, nil},
	identity + "GetUser":        {Nowhere, nil},
	identity + "ListUsers":      {Nowhere, nil},
	identity + "UpdateUser":     {Nowhere, nil},
	identity + "DisableUser":    {Nowhere, nil},
	identity + "EnableUser":     {Nowhere, nil},
	identity + "DeleteUser":     {Nowhere, nil},
	identity + "LinkIdentity":   {Nowhere, nil},
	identity + "UnlinkIdentity": {Nowhere, nil},
	identity + "ListKeys":       {Nowhere, nil},
	identity + "RotateKeys":     {Nowhere, nil},
	identity + "RevokeKey":      {Nowhere, nil},

	identity + "CreateOrg":     {Nowhere, nil},
	identity + "UpdateOrg":     {OfPlace, govern},
	identity + "DeleteOrg":     {Nowhere, nil},
	identity + "CreateProject": {OfPlace, govern},
	identity + "UpdateProject": {OfPlace, govern},
	identity + "DeleteProject": {OfPlace, govern},
	identity + "SetQuota":      {OfProjectOrOrg, nil},
	identity + "GetQuota":      {OfProjectOrOrg, look},

	identity + "GetDefaultQuota": {Nowhere, anyProven},
	identity + "SetDefaultQuota": {Nowhere, nil},

	identity + "BindRole":     {OfPlace, manage},
	identity + "UnbindRole":   {OfPlace, manage},
	identity + "ListBindings": {OfPlace, manage},

	identity + "CreateGroup":       {OfPlace, govern},
	identity + "GetGroup":          {OfPlace, govern},
	identity + "ListGroups":        {OfPlace, govern},
	identity + "UpdateGroup":       {OfPlace, govern},
	identity + "DeleteGroup":       {OfPlace, govern},
	identity + "AddGroupMember":    {OfPlace, govern},
	identity + "RemoveGroupMember": {OfPlace, govern},
	identity + "ListGroupMembers":  {OfPlace, govern},

	// These methods concern only the caller's own invitations.
	identity + "ListInvitations":   {Nowhere, anyProven},
	identity + "AcceptInvitation":  {Nowhere, anyProven},
	identity + "DeclineInvitation": {Nowhere, anyProven},

	identity + "CreateServiceAccount": {OfProject, manage},
	identity + "ListServiceAccounts":  {OfProject, manage},
	identity + "GetServiceAccount":    {OfProject, manage},
	identity + "UpdateServiceAccount": {OfProject, manage},
	identity + "DeleteServiceAccount": {OfProject, manage},

	identity + "ListAuditRecords": {OfPlace, govern},

	credits + "CreateWallet":       {OfNamedProject, bill},
	credits + "GetWallet":          {OfNamedProject, look},
	credits + "ListWallets":        {Nowhere, bill},
	credits + "TopUpWallet":        {OfNamedProject, bill},
	credits + "ChargeWallet":       {OfNamedProject, bill},
	credits + "RefundCharge":       {OfNamedProject, bill},
	credits + "SuspendWallet":      {OfNamedProject, bill},
	credits + "ResumeWallet":       {OfNamedProject, bill},
	credits + "CloseWallet":        {OfNamedProject, bill},
	credits + "ListTransactions":   {OfNamedProject, look},
	credits + "WatchTransactions":  {OfNamedProject, look},
	credits + "GetStatement":       {OfNamedProject, look},
	credits + "CreateReservation":  {OfNamedProject, write},
	credits + "GetReservation":     {OfNamedProject, look},
	credits + "ListReservations":   {OfNamedProject, look},
	credits + "CommitReservation":  {OfNamedProject, write},
	credits + "ReleaseReservation": {OfNamedProject, write},
	credits + "AuditLedger":        {Nowhere, nil},
}

// AnyProven is a pseudo-role in rules. A rule that lists it admits every authenticated caller.
const AnyProven cloud.Role = "anybody proven"

var anyProven = []cloud.Role{AnyProven}

// Open holds the methods that do not call Admit, each with the reason why it needs no authorization.
var Open = map[Method]string{
	identity + "IssueToken":         "gives a token to a caller that proves its identity",
	identity + "ExchangeToken":      "gives a token to a caller with an ID token of another provider",
	identity + "ListLoginProviders": "lists the login providers, which a client needs before it has a token",
	identity + "VerifyToken":        "describes the token that the caller sent",
	nodes + "HeartbeatNode":         "is refused on this port: hosts call it on a port of their own",
}

// unwritten lists the methods that act without changing a record. Only ReportSuccess creates audit records for them.
var unwritten = []Method{
	operators + "BackupCluster", operators + "TransferLeader",
	guests + "SetGuestPassword", guests + "AddGuestSshKeys", guests + "RunGuestCommand",
}

// rolesAt returns the roles that the caller c has in the given tenant, for a method with the rule r.
func (r Rule) rolesAt(c *cloud.Caller, at cloud.Tenant) (roles []cloud.Role) {
	for _, role := range cloud.Roles() {
		// Methods of the scope OfOrg are those for images, which belong to an org. For them a role in any project of
		// the org counts too.
		if c.Has(role, at) || r.Scope == OfOrg && hasInOrg(c, role, at.Org) {
			roles = append(roles, role)
		}
	}
	if mutant.On(mutant.ViewerWrites) && slices.Contains(roles, cloud.ProjectViewer) {
		roles = append(roles, cloud.ProjectMember)
	}
	return roles
}

// allows reports whether the rule lists one of the roles that the caller has in the given tenant, or the caller has the
// role system:admin.
func (r Rule) allows(c *cloud.Caller, at cloud.Tenant) bool {
	return slices.ContainsFunc(r.rolesAt(c, at), func(role cloud.Role) bool {
		return role == cloud.SystemAdmin || slices.Contains(r.Roles, role)
	})
}

func hasInOrg(c *cloud.Caller, role cloud.Role, org cloud.OrgID) bool {
	if !c.Authenticated() {
		return false
	}
	for _, b := range c.Bindings {
		if b.Role == role && b.Org == org && (b.Project == "" || c.Scope.Project == "" || b.Project == c.Scope.Project) {
			return true
		}
	}
	return false
}

// Rules returns a copy of the authorization table. It is for the test that calls every method.
func Rules() map[Method]Rule { return maps.Clone(rules) }

// reading lists prefixes of method names. Reads returns true for a method whose name begins with one of them.
var reading = []string{"Get", "List", "Watch", "Read", "Verify", "WhoAmI", "ClusterStatus", "AuditLedger", "Explain", "Download"}

// Reads reports whether the method changes nothing, judged by the prefix of its name.
func (m Method) Reads() bool {
	verb := m.verb()
	return slices.ContainsFunc(reading, func(r string) bool { return strings.HasPrefix(verb, r) })
}
