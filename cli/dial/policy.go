package dial

import (
	"context"
	"errors"
	"time"

	etcd "go.etcd.io/etcd/api/v3/etcdserverpb"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

const (
	// CreatePatience is the time for which a call that creates something is retried, with its idempotency key, while no
	// endpoint can be reached or endpoints return UNAVAILABLE. It is long enough for an election and for the restart of
	// a member.
	CreatePatience = 10 * time.Second
	// Patience is the time for which other calls that are safe to retry are retried while endpoints return UNAVAILABLE.
	// If no endpoint can be reached, they fail at once, so that a mistyped endpoint is reported at once.
	Patience = 3 * time.Second

	firstPause = 100 * time.Millisecond
	lastPause  = time.Second
)

type policy struct {
	create   bool
	patience time.Duration
}

var (
	// create is the policy of methods that are retried with the same idempotency key.
	create = policy{create: true}
	// repeatable is the policy of methods that are retried without an idempotency key, because a repeat has no further
	// effect.
	repeatable = policy{patience: Patience}
)

// policies lists the methods that are safe to retry: methods that read, methods that set a desired state and, with an
// idempotency key, methods that create something or move credit. Methods that are not listed are sent once.
var policies = map[string]policy{
	vmv1.VmService_CreateVm_FullMethodName:                            create,
	vmv1.ImageService_CreateImage_FullMethodName:                      create,
	vmv1.VolumeService_CreateVolume_FullMethodName:                    create,
	vmv1.VolumeService_RegisterExternalVolume_FullMethodName:          create,
	storagev1.StorageClassService_CreateStorageClass_FullMethodName:   create,
	storagev1.SnapshotService_CreateSnapshot_FullMethodName:           create,
	storagev1.SnapshotService_CreateVmSnapshots_FullMethodName:        create,
	storagev1.SnapshotService_CreateVolumeFromSnapshot_FullMethodName: create,
	operatorv1.OperatorService_CreateNodeToken_FullMethodName:         create,
	operatorv1.InstanceTypeService_CreateInstanceType_FullMethodName:  create,
	vmv1.ImageService_BeginImageUpload_FullMethodName:                 create,

	creditv1.CreditService_CreateWallet_FullMethodName:      create,
	creditv1.CreditService_TopUpWallet_FullMethodName:       create,
	creditv1.CreditService_RefundCharge_FullMethodName:      create,
	creditv1.CreditService_CreateReservation_FullMethodName: create,

	creditv1.CreditService_GetWallet_FullMethodName:          repeatable,
	creditv1.CreditService_ListWallets_FullMethodName:        repeatable,
	creditv1.CreditService_ListTransactions_FullMethodName:   repeatable,
	creditv1.CreditService_CommitReservation_FullMethodName:  repeatable,
	creditv1.CreditService_ReleaseReservation_FullMethodName: repeatable,
	creditv1.CreditService_SuspendWallet_FullMethodName:      repeatable,
	creditv1.CreditService_ResumeWallet_FullMethodName:       repeatable,
	creditv1.CreditService_CloseWallet_FullMethodName:        repeatable,

	vmv1.NodeService_DrainNode_FullMethodName:                       repeatable,
	operatorv1.OperatorService_GetDrain_FullMethodName:              repeatable,
	operatorv1.OperatorService_CancelDrain_FullMethodName:           repeatable,
	vmv1.VmService_GetVm_FullMethodName:                             repeatable,
	vmv1.VmService_ListVms_FullMethodName:                           repeatable,
	vmv1.VmService_StartVm_FullMethodName:                           repeatable,
	vmv1.VmService_StopVm_FullMethodName:                            repeatable,
	vmv1.ImageService_GetImage_FullMethodName:                       repeatable,
	vmv1.ImageService_ListImages_FullMethodName:                     repeatable,
	vmv1.VolumeService_GetVolume_FullMethodName:                     repeatable,
	vmv1.VolumeService_ListVolumes_FullMethodName:                   repeatable,
	vmv1.VolumeService_ResizeVolume_FullMethodName:                  repeatable,
	storagev1.SnapshotService_GetSnapshot_FullMethodName:            repeatable,
	storagev1.SnapshotService_ListSnapshots_FullMethodName:          repeatable,
	storagev1.StorageClassService_GetStorageClass_FullMethodName:    repeatable,
	storagev1.StorageClassService_ListStorageClasses_FullMethodName: repeatable,
	storagev1.StorageClassService_UpdateStorageClass_FullMethodName: repeatable,
	vmv1.NodeService_GetNode_FullMethodName:                         repeatable,
	vmv1.NodeService_ListNodes_FullMethodName:                       repeatable,
	vmv1.NodeService_CordonNode_FullMethodName:                      repeatable,
	vmv1.NodeService_UncordonNode_FullMethodName:                    repeatable,
	operatorv1.OperatorService_ClusterStatus_FullMethodName:         repeatable,
	vmv1.ImageService_UploadImagePart_FullMethodName:                repeatable,
	vmv1.ImageService_CompleteImageUpload_FullMethodName:            repeatable,

	operatorv1.InstanceTypeService_GetInstanceType_FullMethodName:    repeatable,
	operatorv1.InstanceTypeService_ListInstanceTypes_FullMethodName:  repeatable,
	operatorv1.InstanceTypeService_UpdateInstanceType_FullMethodName: repeatable,

	// Adding a rule is not retried, because a repetition would fail with ALREADY_EXISTS; so are deletes and removals, which
	// would fail with NOT_FOUND.
	networkv1.NetworkService_CreateVpc_FullMethodName:             create,
	networkv1.NetworkService_CreateSubnet_FullMethodName:          create,
	networkv1.NetworkService_CreatePort_FullMethodName:            create,
	networkv1.NetworkService_CreateSecurityGroup_FullMethodName:   create,
	networkv1.NetworkService_CreateRouteTable_FullMethodName:      create,
	networkv1.NetworkService_CreateNatGateway_FullMethodName:      create,
	networkv1.NetworkService_CreateFloatingIp_FullMethodName:      create,
	networkv1.NetworkService_CreateServiceIp_FullMethodName:       create,
	networkv1.NetworkService_CreatePeering_FullMethodName:         create,
	networkv1.NetworkService_CreateExternalNetwork_FullMethodName: create,

	networkv1.NetworkService_GetVpc_FullMethodName:                repeatable,
	networkv1.NetworkService_ListVpcs_FullMethodName:              repeatable,
	networkv1.NetworkService_UpdateVpc_FullMethodName:             repeatable,
	networkv1.NetworkService_GetSubnet_FullMethodName:             repeatable,
	networkv1.NetworkService_ListSubnets_FullMethodName:           repeatable,
	networkv1.NetworkService_UpdateSubnet_FullMethodName:          repeatable,
	networkv1.NetworkService_GetPort_FullMethodName:               repeatable,
	networkv1.NetworkService_ListPorts_FullMethodName:             repeatable,
	networkv1.NetworkService_UpdatePort_FullMethodName:            repeatable,
	networkv1.NetworkService_GetSecurityGroup_FullMethodName:      repeatable,
	networkv1.NetworkService_ListSecurityGroups_FullMethodName:    repeatable,
	networkv1.NetworkService_UpdateSecurityGroup_FullMethodName:   repeatable,
	networkv1.NetworkService_GetRouteTable_FullMethodName:         repeatable,
	networkv1.NetworkService_ListRouteTables_FullMethodName:       repeatable,
	networkv1.NetworkService_UpdateRouteTable_FullMethodName:      repeatable,
	networkv1.NetworkService_GetNatGateway_FullMethodName:         repeatable,
	networkv1.NetworkService_ListNatGateways_FullMethodName:       repeatable,
	networkv1.NetworkService_GetFloatingIp_FullMethodName:         repeatable,
	networkv1.NetworkService_ListFloatingIps_FullMethodName:       repeatable,
	networkv1.NetworkService_UpdateFloatingIp_FullMethodName:      repeatable,
	networkv1.NetworkService_GetServiceIp_FullMethodName:          repeatable,
	networkv1.NetworkService_ListServiceIps_FullMethodName:        repeatable,
	networkv1.NetworkService_UpdateServiceIp_FullMethodName:       repeatable,
	networkv1.NetworkService_GetPeering_FullMethodName:            repeatable,
	networkv1.NetworkService_ListPeerings_FullMethodName:          repeatable,
	networkv1.NetworkService_GetExternalNetwork_FullMethodName:    repeatable,
	networkv1.NetworkService_ListExternalNetworks_FullMethodName:  repeatable,
	networkv1.NetworkService_UpdateExternalNetwork_FullMethodName: repeatable,
	networkv1.NetworkService_AcceptPeering_FullMethodName:         repeatable,
	networkv1.NetworkService_UpdatePeering_FullMethodName:         repeatable,
	networkv1.NetworkService_ExplainPath_FullMethodName:           repeatable,

	// CreateServiceAccount is not retried, because its secret is returned only once, and neither is UpdateServiceAccount,
	// which can make a new secret. SetPassword is not retried, because a repetition would revoke tokens that were issued
	// in between.
	identityv1.IdentityService_CreateOrg_FullMethodName:     create,
	identityv1.IdentityService_CreateProject_FullMethodName: create,
	identityv1.IdentityService_CreateUser_FullMethodName:    create,

	identityv1.IdentityService_IssueToken_FullMethodName:          repeatable,
	identityv1.IdentityService_ListLoginProviders_FullMethodName:  repeatable,
	identityv1.IdentityService_VerifyToken_FullMethodName:         repeatable,
	identityv1.IdentityService_WhoAmI_FullMethodName:              repeatable,
	identityv1.IdentityService_RevokeToken_FullMethodName:         repeatable,
	identityv1.IdentityService_GetUser_FullMethodName:             repeatable,
	identityv1.IdentityService_ListUsers_FullMethodName:           repeatable,
	identityv1.IdentityService_DisableUser_FullMethodName:         repeatable,
	identityv1.IdentityService_EnableUser_FullMethodName:          repeatable,
	identityv1.IdentityService_BindRole_FullMethodName:            repeatable,
	identityv1.IdentityService_ListBindings_FullMethodName:        repeatable,
	identityv1.IdentityService_ListInvitations_FullMethodName:     repeatable,
	identityv1.IdentityService_AcceptInvitation_FullMethodName:    repeatable,
	identityv1.IdentityService_ListServiceAccounts_FullMethodName: repeatable,
	identityv1.IdentityService_GetServiceAccount_FullMethodName:   repeatable,
	identityv1.IdentityService_UpdateUser_FullMethodName:          repeatable,
	identityv1.IdentityService_UpdateGroup_FullMethodName:         repeatable,
	identityv1.IdentityService_UpdateOrg_FullMethodName:           repeatable,
	identityv1.IdentityService_UpdateProject_FullMethodName:       repeatable,
	identityv1.IdentityService_GetOrg_FullMethodName:              repeatable,
	identityv1.IdentityService_ListOrgs_FullMethodName:            repeatable,
	identityv1.IdentityService_GetProject_FullMethodName:          repeatable,
	identityv1.IdentityService_ListProjects_FullMethodName:        repeatable,
	identityv1.IdentityService_GetQuota_FullMethodName:            repeatable,
	identityv1.IdentityService_SetQuota_FullMethodName:            repeatable,
	identityv1.IdentityService_ListKeys_FullMethodName:            repeatable,
	identityv1.IdentityService_ListAuditRecords_FullMethodName:    repeatable,

	storagev1.ImageDataService_ListUploadedParts_FullMethodName: repeatable,

	etcd.KV_Range_FullMethodName:              repeatable,
	etcd.Lease_LeaseTimeToLive_FullMethodName: repeatable,
	etcd.Lease_LeaseLeases_FullMethodName:     repeatable,
	etcd.Maintenance_Status_FullMethodName:    repeatable,
	etcd.Maintenance_Alarm_FullMethodName:     repeatable,
	etcd.Auth_Authenticate_FullMethodName:     repeatable,
}

// worthAnother reports whether a call with policy p is retried after err. A call that creates something is retried
// after *Unreachable and *Unavailable errors. Any other call that is safe to retry is retried only after an
// *Unavailable error.
func worthAnother(err error, p policy) bool {
	var unreachableErr *Unreachable
	var answered *Unavailable
	switch {
	case errors.As(err, &unreachableErr):
		return p.create
	case errors.As(err, &answered):
		return p.create || p.patience > 0
	}
	return false
}

// Sleep waits for d. If ctx ends first, it returns the error of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
