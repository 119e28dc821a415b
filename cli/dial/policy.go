package dial

import (
	"context"
	"errors"
	"time"

	etcd "go.etcd.io/etcd/api/v3/etcdserverpb"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

const (
	// CreatePatience is how long a create is said again, with its idempotency key, to a cluster that is not there or says
	// UNAVAILABLE: an election and a member's restart fit into it.
	CreatePatience = 10 * time.Second
	// Patience is the same for other calls that may be said twice, but only while somebody answers: a person who
	// mistyped an endpoint is told at once.
	Patience = 3 * time.Second

	firstPause = 100 * time.Millisecond
	lastPause  = time.Second
)

type policy struct {
	create   bool
	patience time.Duration
}

var (
	create = policy{create: true}
	again  = policy{patience: Patience}
)

// policies says which methods may be said twice: those that read, those that wish for a state, and, under a key, those
// that create or move credit. What is not listed is sent to one member once.
var policies = map[string]policy{
	vmv1.VmService_CreateVm_FullMethodName:                    create,
	vmv1.ImageService_CreateImage_FullMethodName:              create,
	operatorv1.OperatorService_CreateNodeToken_FullMethodName: create,

	creditv1.CreditService_CreateWallet_FullMethodName:      create,
	creditv1.CreditService_TopUpWallet_FullMethodName:       create,
	creditv1.CreditService_RefundCharge_FullMethodName:      create,
	creditv1.CreditService_CreateReservation_FullMethodName: create,

	creditv1.CreditService_GetWallet_FullMethodName:          again,
	creditv1.CreditService_ListWallets_FullMethodName:        again,
	creditv1.CreditService_ListTransactions_FullMethodName:   again,
	creditv1.CreditService_CommitReservation_FullMethodName:  again,
	creditv1.CreditService_ReleaseReservation_FullMethodName: again,
	creditv1.CreditService_SuspendWallet_FullMethodName:      again,
	creditv1.CreditService_ResumeWallet_FullMethodName:       again,
	creditv1.CreditService_CloseWallet_FullMethodName:        again,

	vmv1.VmService_GetVm_FullMethodName:                     again,
	vmv1.VmService_ListVms_FullMethodName:                   again,
	vmv1.VmService_StartVm_FullMethodName:                   again,
	vmv1.VmService_StopVm_FullMethodName:                    again,
	vmv1.ImageService_GetImage_FullMethodName:               again,
	vmv1.ImageService_ListImages_FullMethodName:             again,
	vmv1.NodeService_GetNode_FullMethodName:                 again,
	vmv1.NodeService_ListNodes_FullMethodName:               again,
	vmv1.NodeService_CordonNode_FullMethodName:              again,
	vmv1.NodeService_UncordonNode_FullMethodName:            again,
	operatorv1.OperatorService_ClusterStatus_FullMethodName: again,

	// A service account's secret is shown once and not kept, so its create cannot be answered again; a password that is set
	// twice ends the tokens that were issued between.
	identityv1.IdentityService_CreateOrg_FullMethodName:     create,
	identityv1.IdentityService_CreateProject_FullMethodName: create,
	identityv1.IdentityService_CreateUser_FullMethodName:    create,

	identityv1.IdentityService_IssueToken_FullMethodName:          again,
	identityv1.IdentityService_ListLoginProviders_FullMethodName:  again,
	identityv1.IdentityService_VerifyToken_FullMethodName:         again,
	identityv1.IdentityService_WhoAmI_FullMethodName:              again,
	identityv1.IdentityService_RevokeToken_FullMethodName:         again,
	identityv1.IdentityService_GetUser_FullMethodName:             again,
	identityv1.IdentityService_ListUsers_FullMethodName:           again,
	identityv1.IdentityService_DisableUser_FullMethodName:         again,
	identityv1.IdentityService_EnableUser_FullMethodName:          again,
	identityv1.IdentityService_BindRole_FullMethodName:            again,
	identityv1.IdentityService_ListBindings_FullMethodName:        again,
	identityv1.IdentityService_ListInvitations_FullMethodName:     again,
	identityv1.IdentityService_AcceptInvitation_FullMethodName:    again,
	identityv1.IdentityService_ListServiceAccounts_FullMethodName: again,
	identityv1.IdentityService_GetOrg_FullMethodName:              again,
	identityv1.IdentityService_ListOrgs_FullMethodName:            again,
	identityv1.IdentityService_GetProject_FullMethodName:          again,
	identityv1.IdentityService_ListProjects_FullMethodName:        again,
	identityv1.IdentityService_GetQuota_FullMethodName:            again,
	identityv1.IdentityService_SetQuota_FullMethodName:            again,
	identityv1.IdentityService_ListKeys_FullMethodName:            again,
	identityv1.IdentityService_ListAuditRecords_FullMethodName:    again,

	etcd.KV_Range_FullMethodName:              again,
	etcd.Lease_LeaseTimeToLive_FullMethodName: again,
	etcd.Lease_LeaseLeases_FullMethodName:     again,
	etcd.Maintenance_Status_FullMethodName:    again,
	etcd.Maintenance_Alarm_FullMethodName:     again,
	etcd.Auth_Authenticate_FullMethodName:     again,
}

// worthAnother reports whether the same call may go better in a moment.
func worthAnother(err error, p policy) bool {
	var nobody *Unreachable
	var answered *Unavailable
	switch {
	case errors.As(err, &nobody):
		return p.create
	case errors.As(err, &answered):
		return p.create || p.patience > 0
	}
	return false
}

// Sleep waits, or tells why the context ended.
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
