// Package mutant breaks safety rules on purpose, so that the suites can prove they would notice.
//
// A rule that matters asks On with the name of the way to break it. In every normal build On is the constant false and
// the broken branch is not compiled; with the build tag `mutant` a test turns one on by Set. It knows nothing of ours.
package mutant

// The known mutants. Each is caught by a test named beside it.
const (
	SkipLogSync       = "skip-log-sync"       // the raft log is not fsynced: controlplane/sim
	ForgetBirths      = "forget-births"       // a member with a wiped disk may vote: controlplane/sim
	AckBeforeCommit   = "ack-before-commit"   // a proposal is answered before it is committed: controlplane/sim
	StaleRead         = "stale-read"          // ReadIndex answers without asking a quorum: controlplane/sim
	DropGuards        = "drop-guards"         // a transaction applies although what it read has changed: controlplane/sim
	IgnoreGeneration  = "ignore-generation"   // a report of an older generation is believed: controlplane/sim ring (b)
	ForgetProposalIDs = "forget-proposal-ids" // a retried proposal applies twice: controlplane/sim
	AckBeforeSync     = "ack-before-sync"     // entries are acknowledged before they are durable: controlplane/sim
	DropVoteSync      = "drop-vote-sync"      // a vote is not kept: controlplane/sim
	LearnerVotes      = "learner-votes"       // a member that was only added counts in the quorum: controlplane/engine/consensus
	KeepAttachment    = "keep-attachment"     // a deleted key stays one of its lease's: controlplane/engine/mvcc
	SplitAppliedIndex = "split-applied-index" // the applied index is written beside the batch, not in it: controlplane/engine/mvcc
	IgnoreHolds       = "ignore-holds"        // credit that is reserved can be reserved again: controlplane/money/credit/ledger
	CommitTwice       = "commit-twice"        // a reservation that has ended can be committed: controlplane/money/credit/ledger
	EvictForgets      = "evict-forgets"       // a host is forgotten although VMs are placed on it: controlplane/compute/node
	IgnoreBans        = "ignore-bans"         // a banned key is let in: controlplane/compute/node
	KeepEvictedOpen   = "keep-evicted-open"   // what an evicted host has open stays open: controlplane/compute/node
	ReuseInvitation   = "reuse-invitation"    // a member's token works for a second key: controlplane/cluster/jointoken
	LateCommit        = "late-commit"         // a reservation can be committed after its deadline: controlplane/money/credit/ledger
	UnfitCertificate  = "unfit-certificate"   // a certificate that has expired takes the place of a good one: controlplane/engine/certfile
	SecretInPlaintext = "secret-in-plaintext" // a token goes to another host in plaintext: cli/dial
	ChargeHourTwice   = "charge-hour-twice"   // a meter does not move past the hours that it billed: controlplane/money/billing
	ForgetShortRuns   = "forget-short-runs"   // what rises within an hour is not billed: controlplane/money/billing
	KeepPaidBill      = "keep-paid-bill"      // a bill stays when it is paid: controlplane/money/billing
	KeepReservation   = "keep-reservation"    // a VM that goes keeps what was reserved for it: controlplane/money/billing
	AdmitDebtor       = "admit-debtor"        // who owes may create more: controlplane/money/billing
	OwnClock          = "own-clock"           // a member whose clock is wrong goes by it: controlplane/engine/clock
	TrustUnproven     = "trust-unproven"      // whoever proved nothing counts as proven: controlplane
	ForeignTenant     = "foreign-tenant"      // that a request names another tenant than the token is overlooked: controlplane
	AnyAudience       = "any-audience"        // a token that was made for others is believed: controlplane
	GrantUnasked      = "grant-unasked"       // another org's grant acts before its user accepts it: controlplane/accounts/identity
	IgnoreRevocation  = "ignore-revocation"   // a token that was revoked is believed: controlplane
	NoWriteBudget     = "no-write-budget"     // a tenant may write as much as it likes: controlplane/records/budget
)
