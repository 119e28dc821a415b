// Package mutant disables single safety rules on purpose, so that tests can show that they detect each violation.
//
// Code that implements a safety rule calls On with the name of the mutant that breaks the rule. In a normal build On
// always returns false and the broken branch is not compiled. With the build tag `mutant`, a test activates one mutant
// with Set. The package imports nothing of Trivet.
package mutant

// Mutants, each with the package whose tests must fail when the mutant is active.
const (
	SkipLogSync       = "skip-log-sync"       // the raft log is not fsynced: controlplane/sim
	ForgetDirIDs      = "forget-dir-ids"      // a member whose disk was wiped may vote: controlplane/sim
	AckBeforeCommit   = "ack-before-commit"   // a proposal is acknowledged before it is committed: controlplane/sim
	StaleRead         = "stale-read"          // ReadIndex returns without contacting a quorum: controlplane/sim
	DropGuards        = "drop-guards"         // a transaction applies although its reads are stale: controlplane/sim
	IgnoreGeneration  = "ignore-generation"   // a report of an older generation is accepted: controlplane/sim ring (b)
	ForgetProposalIDs = "forget-proposal-ids" // a retried proposal applies twice: controlplane/sim
	AckBeforeSync     = "ack-before-sync"     // entries are acknowledged before they are durable: controlplane/sim
	DropVoteSync      = "drop-vote-sync"      // a vote is not stored: controlplane/sim
	LearnerVotes      = "learner-votes"       // a learner counts in the quorum: controlplane/engine/consensus
	KeepAttachment    = "keep-attachment"     // a deleted key stays on its lease: controlplane/engine/mvcc
	SplitAppliedIndex = "split-applied-index" // the applied index is not in the batch: controlplane/engine/mvcc
	IgnoreHolds       = "ignore-holds"        // credit can be reserved twice: controlplane/money/credit/ledger
	CommitTwice       = "commit-twice"        // an ended reservation can be committed: controlplane/money/credit/ledger
	EvictForgets      = "evict-forgets"       // a host with VMs can be evicted: controlplane/compute/node
	IgnoreBans        = "ignore-bans"         // a banned key is accepted: controlplane/compute/node
	KeepEvictedOpen   = "keep-evicted-open"   // an evicted host's connections stay open: controlplane/compute/node
	ReuseInvitation   = "reuse-invitation"    // a join token works for a second key: controlplane/cluster/jointoken
	LateCommit        = "late-commit"         // commit is accepted after the deadline: controlplane/money/credit/ledger
	UnfitCertificate  = "unfit-certificate"   // an expired certificate replaces a valid one: controlplane/engine/certfile
	SecretInPlaintext = "secret-in-plaintext" // a token is sent to another host in plaintext: cli/dial
	ChargeHourTwice   = "charge-hour-twice"   // a meter does not pass the hours it billed: controlplane/money/billing
	ForgetShortRuns   = "forget-short-runs"   // a price rise in an hour is not billed: controlplane/money/billing
	KeepPaidBill      = "keep-paid-bill"      // a paid bill is not removed: controlplane/money/billing
	KeepReservation   = "keep-reservation"    // a deleted VM's reservation is kept: controlplane/money/billing
	AdmitDebtor       = "admit-debtor"        // a project with debts may create VMs: controlplane/money/billing
	StartTwice        = "start-twice"         // a start that was executed is executed again: nodeagent/machine
	DestroyUnruled    = "destroy-unruled"     // a VM without desired state is destroyed: nodeagent/machine
	ApplyForeign      = "apply-foreign"       // another cluster's desired state is applied at any age: nodeagent/machine
	FollowLowerTerm   = "follow-lower-term"   // messages of a lower term are accepted: nodeagent/uplink
	DeliverIncomplete = "deliver-incomplete"  // a snapshot is delivered before its complete mark: nodeagent/uplink
	OwnClock          = "own-clock"           // a member with a wrong clock uses its own time: controlplane/engine/clock
	TrustUnproven     = "trust-unproven"      // unauthenticated callers count as authenticated: controlplane
	ForeignTenant     = "foreign-tenant"      // a request for another tenant than the token's is accepted: controlplane
	AnyAudience       = "any-audience"        // a token for another audience is accepted: controlplane
	GrantUnasked      = "grant-unasked"       // another org's grant applies unaccepted: controlplane/accounts/identity
	IgnoreRevocation  = "ignore-revocation"   // a revoked token is accepted: controlplane
	NoWriteBudget     = "no-write-budget"     // a tenant's write rate is not limited: controlplane/records/budget
)
