// Package mutant disables single safety rules on purpose, so that tests can show that they detect each violation.
//
// Code that implements a safety rule calls On with the name of the mutant that breaks the rule. In a normal build On
// always returns false and the broken branch is not compiled. In a build with the tag `mutant`, a test activates one
// mutant with Set. The package imports no other package of Trivet.
package mutant

// Mutants of images, hosts, keys and disks, each with the package whose tests must fail when the mutant is active.
const (
	SkipImageDigest    = "skip-image-digest"    // the SHA-256 of received image bytes is not checked: controlplane/compute/image, nodeagent/disk
	EvictUsedImage     = "evict-used-image"     // the image cache of a host removes images that disks are based on: nodeagent/disk
	AvailableEarly     = "available-early"      // an image is AVAILABLE before a majority of the members stores its content: controlplane/compute/image
	AckPartEarly       = "ack-part-early"       // a part of an image upload is acknowledged before a majority of the members stores it: controlplane/compute/image
	DropPartsEarly     = "drop-parts-early"     // the parts of an upload are deleted before a majority of the members stores the image: controlplane/compute/image
	KeepExpiredUpload  = "keep-expired-upload"  // an expired image upload keeps its parts: controlplane/compute/image
	FetchAnyAddress    = "fetch-any-address"    // an image is fetched from a private address: controlplane/compute/image/websource
	FetchAnyLength     = "fetch-any-length"     // an image of any length is fetched: controlplane/compute/image/websource
	FollowImportLinks  = "follow-import-links"  // an import follows symbolic links: controlplane/compute/image
	ImportAnywhere     = "import-anywhere"      // a file outside of the import directories can be imported: controlplane/compute/image
	ImportForeignDir   = "import-foreign-dir"   // an org imports from a directory of another org: controlplane/compute/image
	AcceptBackingFile  = "accept-backing-file"  // a qcow2 image may name a backing file: shared/qcow2
	AcceptDataFile     = "accept-data-file"     // a qcow2 image may keep its data in another file: shared/qcow2
	AcceptEncrypted    = "accept-encrypted"     // an encrypted qcow2 image is accepted: shared/qcow2
	GuestAsRoot        = "guest-as-root"        // QEMU runs as root: nodeagent/qemu
	GuestUnsandboxed   = "guest-unsandboxed"    // QEMU runs without its seccomp filter: nodeagent/qemu
	GuestOutsideCgroup = "guest-outside-cgroup" // QEMU runs in the control group of the agent: nodeagent/qemu
	GuestKeepsCaps     = "guest-keeps-caps"     // QEMU keeps its capability bounding set: nodeagent/qemu
	BootWithoutKeys    = "boot-without-keys"    // a VM with secure boot gets an NVRAM without keys: nodeagent/qemu
	ShareTPMUser       = "share-tpm-user"       // a VM's TPM has the uid of its QEMU: nodeagent/qemu
	SkipNVRAMCopy      = "skip-nvram-copy"      // a migration does not copy the NVRAM before the switchover: nodeagent/qemu
	MigrateLostTPM     = "migrate-lost-tpm"     // a VM whose TPM has ended is migrated: nodeagent/qemu
	MigrateSuspended   = "migrate-suspended"    // a guest in the ACPI state S3 is handed over to the target of a migration: nodeagent/qemu
	StartIncomplete    = "start-incomplete"     // a VM starts from the incomplete state of the firmware of a failed migration: nodeagent/qemu
	AcceptUnsynced     = "accept-unsynced"      // the target of a migration runs a guest without the state of its firmware: nodeagent/qemu
	LeaveHostState     = "leave-host-state"     // after a failed migration, a VM stays with the target without the state of its TPM: shared/cloud
	ReuseLiveUID       = "reuse-live-uid"       // a VM gets a uid under which a process runs: nodeagent/qemu
	AcceptTruncated    = "accept-truncated"     // the end of a truncated backup counts as its regular end: controlplane/engine/backup
	KeepInvalidStreams = "keep-invalid-streams" // open streams go on after their token became invalid: controlplane/edge/rpc
	LoopbackForAll     = "loopback-for-all"     // REST endpoints for clients on loopback serve all clients: controlplane/edge/rest, controlplane/accounts/identity
	DetachUnreleased   = "detach-unreleased"    // the port of a NIC is released although the guest has its device: nodeagent/qemu
	OpenStaleVolume    = "open-stale-volume"    // a volume is opened for an older attachment than it was opened for before: nodeagent/volume
	OpenVolumeTwice    = "open-volume-twice"    // a volume is opened although a process has it open: nodeagent/volume
	WriteWithoutLock   = "write-without-lock"   // a record of a shared pool is replaced although the lock of the pool was lost: nodeagent/volume
	RemakeDeleted      = "remake-deleted"       // a host with an old desired state makes a deleted volume of several hosts again: nodeagent/volume
	CheckDeletionEarly = "check-deletion-early" // a volume that was deleted while a host began to make it is made again: nodeagent/volume
	KeepLateImage      = "keep-late-image"      // the RBD image that was made of a deleted volume is kept: nodeagent/volume
	SweepEarly         = "sweep-early"          // a base image in a Ceph pool is deleted as soon as no volume needs it: nodeagent/volume
	StaleSnapshot      = "stale-snapshot"       // a host takes a snapshot of an RBD volume that was attached elsewhere since: nodeagent/volume
	StaleFinish        = "stale-finish"         // a snapshot of an RBD volume is completed that a later attachment may have written: nodeagent/volume
	TwoInstants        = "two-instants"         // a VM starts while snapshots of its detached volumes are taken one after the other: nodeagent/storage
	TakeWithoutHold    = "take-without-hold"    // the guest runs while the snapshots of its RBD volumes and other volumes are taken: nodeagent/qemu
	KeepLateRecord     = "keep-late-record"     // a host of a shared pool keeps the temporary record of a host that lost its lock: nodeagent/volume
	ReuseUnfinished    = "reuse-unfinished"     // a volume gets the file that another host of a shared pool is still writing: nodeagent/volume
	FlattenUsedVolume  = "flatten-used-volume"  // a flattened copy replaces a volume that a VM has opened since the copy began: nodeagent/volume
	FinishFailed       = "finish-failed"        // a snapshot is recorded as complete after another host has recorded it as failed: nodeagent/volume
	OpenPlainVolume    = "open-plain-volume"    // a file that is not encrypted is opened as an encrypted volume: nodeagent/storage
	ImportPlainImage   = "import-plain-image"   // an image is copied to an encrypted RBD volume without encryption: nodeagent/volume
	CopyDecrypted      = "copy-decrypted"       // the content of an encrypted disk is copied to a file that is not encrypted: nodeagent/qemu
	StoreVolumeKey     = "store-volume-key"     // the agent writes the keys of encrypted volumes to its disk: nodeagent/uplink
	ExportEncrypted    = "export-encrypted"     // an export of a snapshot of an encrypted volume is not refused: controlplane/compute/snapshot
	NewKeyForCopy      = "new-key-for-copy"     // a volume made from a snapshot of an encrypted volume gets a key of its own: controlplane/compute/volume
	DropNeededKey      = "drop-needed-key"      // an encrypted volume with snapshots is deleted, and its key with it: controlplane/compute/volume
	SendKeyToAll       = "send-key-to-all"      // the host of a detached volume gets the volume's key: controlplane/compute/volume
	KeepVolumeKey      = "keep-volume-key"      // the key of a deleted volume stays in the records: controlplane/compute/volume
	FlattenEarly       = "flatten-early"        // a volume counts as independent of its image before its host has reported it as flattened: shared/cloud, controlplane/sim
	FlattenOverlayOnly = "flatten-overlay-only" // flattening copies the data of the overlay but not of the image: nodeagent/volume
	RecordIncomplete   = "record-incomplete"    // a volume counts as flattened although its file lacks a part of the image: nodeagent/volume
	FenceWithoutBlock  = "fence-without-block"  // the attachment of a removed host ends although its QEMU can still write: nodeagent/volume
	ExportWithoutZeros = "export-without-zeros" // an export of the changes since a snapshot lacks the ranges that are zero now: nodeagent/volume
	SkipConfirm        = "skip-confirm"         // a guest gets an RBD image whose attachment ended while QEMU opened the image: nodeagent/volume
	OpenUnflushedImage = "open-unflushed-image" // an RBD image is opened although its last attachment is not flushed: nodeagent/volume
	OpenBeforeRecord   = "open-before-record"   // an RBD image is opened before its attachment is recorded in the cluster: nodeagent/volume
	OverwriteRecord    = "overwrite-record"     // the record of an RBD image is replaced although another host has changed it: nodeagent/volume
	FenceLateClients   = "fence-late-clients"   // a process may open an RBD image after the addresses to block were read: nodeagent/volume
	FenceLaterUse      = "fence-later-use"      // an old request to fence a volume blocks the VM that has the volume now: nodeagent/volume
	DetachUnconfirmed  = "detach-unconfirmed"   // a volume is detached while QEMU opens its RBD image: nodeagent/storage
	AcceptOldList      = "accept-old-list"      // an older desired state of a volume replaces a newer one: nodeagent/storage
	DeleteStored       = "delete-stored"        // an assignment that was stored on disk deletes volumes: nodeagent/storage
	FlushOpenVolume    = "flush-open-volume"    // a volume counts as flushed although a process has it open: nodeagent/volume
	ExpireEarly        = "expire-early"         // a new leader ends leases before their TTL has passed: controlplane/kv/lessor, controlplane/kv
	ExpireDeposed      = "expire-deposed"       // a former leader can still end leases: controlplane/kv
	SkipWatchEvent     = "skip-watch-event"     // a watcher that reads in parts misses an event: controlplane/engine/mvcc/watch
	ReorderWatch       = "reorder-watch"        // a watcher gets events out of order: controlplane/engine/mvcc/watch, controlplane/kv/watch
	ReadCompacted      = "read-compacted"       // a read below the compact revision succeeds: controlplane/kv
	WatchCompacted     = "watch-compacted"      // a watch may begin below the compact revision: controlplane/kv/watch
	SkipPermissions    = "skip-permissions"     // permissions of etcd's users are not checked: controlplane/kv
	StalePermission    = "stale-permission"     // a write is applied with permissions that were revoked before it is applied: controlplane/kv
	KeepOldTokens      = "keep-old-tokens"      // a token stays valid after a new password, or after authentication was disabled: controlplane/kv/users
	HideCorruption     = "hide-corruption"      // members with different data raise no alarm: controlplane/kv
	WriteAfterFailure  = "write-after-failure"  // writing continues after the first I/O error: controlplane/engine/failstop
	PromoteEarly       = "promote-early"        // a learner that has not caught up is promoted: controlplane/engine/consensus
	ReadmitRemoved     = "readmit-removed"      // a member with a removed data directory can be added again: controlplane/engine/consensus
	HearRemoved        = "hear-removed"         // messages from a removed data directory are accepted: controlplane/engine/consensus
	SkipInstallMarker  = "skip-install-marker"  // the log has no record that the installation of a snapshot began: controlplane/engine/consensus
)

// Mutants of replication, VMs, credit, tokens and limits, each with the package whose tests must fail when the mutant
// is active.
const (
	SkipLogSync       = "skip-log-sync"       // the raft log is not fsynced: controlplane/sim
	ForgetDirIDs      = "forget-dir-ids"      // a member whose disk was wiped may vote: controlplane/sim
	AckBeforeCommit   = "ack-before-commit"   // a proposal is acknowledged before it is committed: controlplane/sim
	StaleRead         = "stale-read"          // ReadIndex returns without contacting a quorum: controlplane/sim
	DropGuards        = "drop-guards"         // a transaction is applied although keys that it read have changed: controlplane/sim
	IgnoreGeneration  = "ignore-generation"   // a report of an older generation is accepted: controlplane/sim
	ReserveNewSize    = "reserve-new-size"    // a resize of a running VM allocates only the new size: controlplane/compute/vm
	KeepGuestOutput   = "keep-guest-output"   // the output of a program in a guest is read without a limit: nodeagent/qemu
	ExecUnpermitted   = "exec-unpermitted"    // a program runs in the guest of a VM that does not allow it: controlplane/compute/vm
	ForgetProposalIDs = "forget-proposal-ids" // a repeated proposal is applied twice: controlplane/sim
	AckBeforeSync     = "ack-before-sync"     // entries are acknowledged before they are durable: controlplane/sim
	DropVoteSync      = "drop-vote-sync"      // a raft vote is not written to disk: controlplane/sim
	LearnerVotes      = "learner-votes"       // a learner counts for the quorum: controlplane/engine/consensus
	KeepAttachment    = "keep-attachment"     // a deleted key stays attached to its lease: controlplane/engine/mvcc
	SplitAppliedIndex = "split-applied-index" // the applied index is written apart from the data that it belongs to: controlplane/engine/mvcc
	IgnoreHolds       = "ignore-holds"        // reserved credit can be reserved again: controlplane/money/credit/ledger
	CommitTwice       = "commit-twice"        // an ended reservation can be committed: controlplane/money/credit/ledger
	EvictForgets      = "evict-forgets"       // a host with VMs can be evicted: controlplane/compute/node
	IgnoreBans        = "ignore-bans"         // a host with a banned key is accepted: controlplane/compute/node
	KeepEvictedOpen   = "keep-evicted-open"   // an evicted host's connections stay open: controlplane/compute/node
	ReuseInvitation   = "reuse-invitation"    // a second process can use a join token: controlplane/cluster/jointoken
	LateCommit        = "late-commit"         // a reservation can be committed after its deadline: controlplane/money/credit/ledger
	UnfitCertificate  = "unfit-certificate"   // an expired certificate replaces a valid one: controlplane/engine/certfile
	SecretInPlaintext = "secret-in-plaintext" // a token is sent to another host in plaintext: cli/dial
	ChargeHourTwice   = "charge-hour-twice"   // hours of a VM that were billed are billed again: controlplane/money/billing
	ForgetShortRuns   = "forget-short-runs"   // a higher price within an hour that was billed already is not billed: controlplane/money/billing
	KeepPaidBill      = "keep-paid-bill"      // a bill that was paid stays in the list of unpaid bills: controlplane/money/billing
	KeepReservation   = "keep-reservation"    // the credit reserved for a deleted VM is not released: controlplane/money/billing
	AdmitDebtor       = "admit-debtor"        // a project with debts may create VMs: controlplane/money/billing
	StartTwice        = "start-twice"         // a requested start of a VM is executed twice: nodeagent/machine
	DestroyUnruled    = "destroy-unruled"     // a VM without desired state is destroyed: nodeagent/machine
	RunUncommitted    = "run-uncommitted"     // the target of a migration runs the guest before the switchover is committed: nodeagent/machine
	RunHandedOver     = "run-handed-over"     // the source of a migration runs the guest after it has handed the guest over: nodeagent/machine
	ContinueCancelled = "continue-cancelled"  // the source of a migration continues an attempt that it has cancelled: nodeagent/machine
	HandOverRunning   = "hand-over-running"   // the source of a migration hands over a guest that was not stopped before QEMU had sent its memory: nodeagent/machine, nodeagent/qemu
	SwitchUncommitted = "switch-uncommitted"  // the source of a migration hands the guest over before the switchover is committed: nodeagent/machine
	ApplyForeign      = "apply-foreign"       // the desired state of a restored cluster is applied to a VM although it is older than the VM: nodeagent/machine
	FollowLowerTerm   = "follow-lower-term"   // messages of a lower term are accepted: nodeagent/uplink
	DeliverIncomplete = "deliver-incomplete"  // a snapshot of the desired state is applied before all its messages have arrived: nodeagent/uplink
	OwnClock          = "own-clock"           // a member with a wrong clock uses its own time: controlplane/engine/clock
	TrustUnproven     = "trust-unproven"      // unauthenticated callers count as authenticated: controlplane
	ForeignTenant     = "foreign-tenant"      // a request for another tenant than the token's is accepted: controlplane
	AnyAudience       = "any-audience"        // a token for another audience is accepted: controlplane
	GrantUnasked      = "grant-unasked"       // a role given by another org is effective before the user accepts it: controlplane/accounts/identity
	IgnoreRevocation  = "ignore-revocation"   // a revoked token is accepted: controlplane
	ViewerWrites      = "viewer-writes"       // project:viewer has the rights of project:member: controlplane
	ForgetAnswers     = "forget-answers"      // the response for an idempotency key is not stored: controlplane/compute/vm
	StaleQuota        = "stale-quota"         // a quota is checked against usage that may have changed: controlplane/compute/vm, controlplane/compute/volume
	KeepOldCell       = "keep-old-cell"       // a host whose free capacity changes stays in its old cell of the index of hosts: controlplane/compute/schedule
	CountLostHost     = "count-lost-host"     // the capacity of a lost host counts for the VMs that it loses: controlplane/compute/schedule
	AllocateTwice     = "allocate-twice"      // a VM is placed without regard to concurrent placements on the same host: controlplane/compute/vm
	UnauditedChange   = "unaudited-change"    // a change is stored without an audit record: controlplane/accounts/identity
	RepeatUnkeyed     = "repeat-unkeyed"      // a command without an idempotency key is sent again to the next leader: controlplane/records/leader
	AcceptExpired     = "accept-expired"      // an expired token is accepted: controlplane/accounts/identity
	AcceptAnyKey      = "accept-any-key"      // a token with another key's signature is accepted: controlplane/accounts/identity
	AcceptHMAC        = "accept-hmac"         // a token may be signed with the public key as secret: controlplane/accounts/identity
	AcceptDisabled    = "accept-disabled"     // a disabled user can log in: controlplane/accounts/identity
	IgnoreEpoch       = "ignore-epoch"        // a token from before a new password is accepted: controlplane/accounts/identity
	IgnoreSkew        = "ignore-skew"         // a member with a wrong clock accepts tokens: controlplane/accounts/identity
	AnyCertificate    = "any-certificate"     // an internal port accepts certificates of every kind: shared/mtls
	AnyNodeID         = "any-node-id"         // a heartbeat that a host sends for another host is accepted: controlplane/compute/node
	AcceptAnyForward  = "accept-any-forward"  // a forwarded request is not authenticated: controlplane/kv/restapi
	ReplayForward     = "replay-forward"      // a recorded forwarded request is accepted again: controlplane/kv/restapi
	UnlimitedGuesses  = "unlimited-guesses"   // wrong passwords are not counted: controlplane/accounts/identity/password
	NoWriteBudget     = "no-write-budget"     // a tenant's write rate is not limited: controlplane/records/budget
	LooseConntrack    = "loose-conntrack"     // the segment of a revoked TCP connection begins a new one: nodeagent/firewall
	TrustAfterError   = "trust-after-error"   // the packet filter that a failed call left is not read back: nodeagent/firewall
	KeepRevoked       = "keep-revoked"        // connections that the rules no longer permit continue: nodeagent/firewall
	LooseForever      = "loose-forever"       // TCP connections may begin in the middle long after a migration: nodeagent/netdev
	UnfilteredPort    = "unfiltered-port"     // the device of a port is up before its packet filter is installed: nodeagent/netdev
	AcceptBeforeRules = "accept-before-rules" // packets are forwarded before the rules of security groups: nodeagent/firewall
	ForwardDenied     = "forward-denied"      // packets are forwarded to addresses of the underlay: nodeagent/firewall, nodeagent/edge
	PassForged        = "pass-forged"         // frames with forged addresses pass: nodeagent/firewall
	OverlappingLists  = "overlapping-lists"   // the rules for an allowed address pair also apply to addresses of other ports within its prefix: nodeagent/firewall
	AnyList           = "any-list"            // the rules of one port apply to another one: nodeagent/firewall
	DropOldList       = "drop-old-list"       // rules are deleted while ports still have them: nodeagent/firewall
	PassReserved      = "pass-reserved"       // an address pair may be the address of a gateway: nodeagent/firewall
	EnterMainThread   = "enter-main-thread"   // the agent's main thread enters the namespaces of VPCs: nodeagent/nsthread
)

// Mutants of volumes, each with the package whose tests must fail when the mutant is active.
const (
	AttachTwice              = "attach-twice"               // a volume that a VM has is attached to another VM: controlplane/compute/vm, controlplane/sim, shared/cloud
	AttachUnflushed          = "attach-unflushed"           // a volume is attached again before its host has flushed it: controlplane/compute/vm, shared/cloud
	AttachElsewhere          = "attach-elsewhere"           // a volume is attached to a VM on another host than the volume's: controlplane/compute/vm, shared/cloud
	MoveUnflushed            = "move-unflushed"             // a volume moves to another host before its former host has flushed it: shared/cloud, controlplane/compute/volume, controlplane/sim
	AnyPoolID                = "any-pool-id"                // a volume of a shared pool moves to a host whose pool of the same name is another directory: controlplane/compute/volume
	CountSharedPoolTwice     = "count-shared-pool-twice"    // each host counts the volumes of a shared pool on its own: controlplane/compute/volume, controlplane/sim
	MoveDuringSnapshot       = "move-during-snapshot"       // a volume of a shared pool moves while its host copies it for a snapshot: controlplane/compute/volume
	KeepAttachmentGeneration = "keep-attachment-generation" // an attachment does not increment the attachment generation: controlplane/compute/vm, controlplane/sim, shared/cloud
	FlushUngranted           = "flush-ungranted"            // a host reports an attachment generation as flushed that was not granted yet: shared/cloud
	ReleaseDeletedEarly      = "release-deleted-early"      // the volumes of a deleted VM are detached before its host has destroyed it: controlplane/compute/vm, controlplane/sim
	ForgetSnapshotEarly      = "forget-snapshot-early"      // a report from before the deletion of a snapshot counts as the deletion of its bytes: controlplane/compute/snapshot
	ReplaceSnapshot          = "replace-snapshot"           // a copy of a later instant replaces a snapshot: controlplane/compute/snapshot
	CopyDisksInTurn          = "copy-disks-in-turn"         // the copies of several disks begin one after the other: nodeagent/qemu
	TwoConsoleWriters        = "two-console-writers"        // two sessions write to one serial port: nodeagent/machine
	ReuseConsoleTicket       = "reuse-console-ticket"       // a ticket opens a second connection: controlplane/compute/console
	KeepFrozen               = "keep-frozen"                // the file systems of a guest stay frozen after a snapshot: nodeagent/qemu
	ReuseFDSets              = "reuse-fd-sets"              // two disks of a running QEMU can get one descriptor set, so that QEMU opens the wrong file: nodeagent/qemu
	ForgetBytesEarly         = "forget-bytes-early"         // an old report about a volume counts as the deletion of its bytes: controlplane/compute/volume
	ForgetUnseenBytes        = "forget-unseen-bytes"        // a report of a failed deletion counts as the deletion of a volume's bytes: controlplane/compute/volume
	RunWithoutLease          = "run-without-lease"          // VMs run on after the lease of their host has ended: nodeagent
	LeaseFromReceipt         = "lease-from-receipt"         // a lease begins when the response to the heartbeat was received, not when the heartbeat was sent: nodeagent/uplink
	StartStaleAssignment     = "start-stale-assignment"     // after a lease has ended, VMs are started from an assignment of an earlier session: nodeagent
	RecoverUnconfirmed       = "recover-unconfirmed"        // a VM moves from a lost host that has not confirmed to stop it: controlplane/compute/vm
	FenceEarly               = "fence-early"                // a VM moves from a host whose lease has not ended: controlplane/sim
	RenewFencedLease         = "renew-fenced-lease"         // a host gets a new lease while it is being fenced: controlplane/compute/node
	KeepLostAttachment       = "keep-lost-attachment"       // the attachment on a lost host counts as ended before another host has ended it: controlplane/compute/vm
	FlushLostHost            = "flush-lost-host"            // a volume counts as flushed although its host was removed while it had the volume open: controlplane/compute/volume
	RegisterTwice            = "register-twice"             // an RBD image is registered as two volumes: controlplane/compute/volume
	RegisterOwnImage         = "register-own-image"         // an RBD image that Trivet has made is registered: shared/cloud, controlplane/compute/volume
	RegisterElsewhere        = "register-elsewhere"         // an RBD image of another Ceph pool than the class's is registered: controlplane/compute/volume
	ReleaseImageEarly        = "release-image-early"        // an RBD image is registered again before its former volume has released it: controlplane/compute/volume
	AttachUnchecked          = "attach-unchecked"           // a registered volume is attached before a host has checked its RBD image: shared/cloud
	AdoptOpenImage           = "adopt-open-image"           // a registered RBD image becomes AVAILABLE although a client has it open: nodeagent/volume
	AdoptTwice               = "adopt-twice"                // a registered RBD image becomes a second volume although its record names the first one: nodeagent/volume
	DeleteRegistered         = "delete-registered"          // the RBD image of a registered volume is deleted with the volume: nodeagent/volume
	KeepClassKey             = "keep-class-key"             // hosts with volumes do not get the new key of a storage class: controlplane/compute/volume
	ReleaseAttachedDisk      = "release-attached-disk"      // a volume is detached although the guest still has the disk: controlplane/compute/vm, controlplane/sim, shared/cloud
)

// Mutants of live migration, each with the package whose tests must fail when the mutant is active.
const (
	CommitCanceled          = "commit-canceled"           // the switchover of a migration is committed although it was cancelled: shared/cloud
	SwitchWithoutGeneration = "switch-without-generation" // the switchover does not increment the VM's generation: shared/cloud
	RollBackUnproven        = "roll-back-unproven"        // a migration is rolled back although the target may run the guest: shared/cloud, controlplane/sim
	ReleaseSourceEarly      = "release-source-early"      // the source gets the order to destroy the guest before the target runs it: shared/cloud
	KeepTargetLeaseRule     = "keep-target-lease-rule"    // after a rollback, the confirmation of the target to stop the VM with its lease counts as that of the source: shared/cloud
	ObeyOldAttempt          = "obey-old-attempt"          // a report about an earlier migration of a VM counts for the present one: shared/cloud
	PlaceOnDraining         = "place-on-draining"         // a VM is placed on a host that is being drained: controlplane/compute/vm
	MaintenanceEarly        = "maintenance-early"         // a host is in maintenance while a VM runs on it: controlplane/compute/vm, controlplane/compute/drain
	StartInMaintenance      = "start-in-maintenance"      // a VM is started on a host in maintenance: controlplane/compute/vm
	ShutDownMovable         = "shut-down-movable"         // a forced drain shuts VMs down before the others have moved: controlplane/compute/drain
	SwitchWithoutGrant      = "switch-without-grant"      // the switchover does not change the attachment generation of a volume: shared/cloud
	RollBackWithoutGrant    = "roll-back-without-grant"   // a rollback does not change the attachment generation of a volume: shared/cloud
	ChangeMigratingVolume   = "change-migrating-volume"   // a volume is changed while its VM is being migrated: controlplane/compute/vm
	CopyNewWritesOnly       = "copy-new-writes-only"      // the content that a disk has when its migration begins is not copied: nodeagent/qemu
	KeepStandbyHost         = "keep-standby-host"         // a host keeps a volume after a migration to or from it has ended: controlplane/compute/vm
	MigrateBesideOldAgent   = "migrate-beside-old-agent"  // a VM with a volume in a shared pool is migrated although an old agent uses the pool: controlplane/compute/vm
	CommitBesideOldAgent    = "commit-beside-old-agent"   // the switchover of a VM with a volume in a shared pool is committed although an old agent uses the pool by now: controlplane/compute/vm
	FreeMigratedVolume      = "free-migrated-volume"      // an RBD volume of a VM that is deleted after a switchover is free although the source may run the guest: controlplane/compute/vm
	OpenStandbyVolume       = "open-standby-volume"       // a host whose VM runs elsewhere opens a volume for writing: nodeagent/storage
	StandbyWithoutLock      = "standby-without-lock"      // the target of a migration opens a file without a lock: nodeagent/volume
	StandbyOfOtherVM        = "standby-of-other-vm"       // a second VM opens a volume as the target of a migration: nodeagent/volume
	ActivateStale           = "activate-stale"            // the target of a migration gets a volume that the source has taken back: nodeagent/volume
	TakeBackUnproven        = "take-back-unproven"        // the source of a migration takes a volume back that the target may write to: nodeagent/volume
	TakeBackActivated       = "take-back-activated"       // the source of a migration takes a volume back that the target has activated: nodeagent/volume, nodeagent/machine
	RunUnactivated          = "run-unactivated"           // the target of a migration runs the guest with the generation of the source: nodeagent/machine
	TwoMigrationHolders     = "two-migration-holders"     // the target of an aborted migration gets no order to destroy the VM: controlplane/compute/vm
)

// Mutants of the services for guests in a VPC, each with the package whose tests must fail when the mutant is active.
const (
	AnyHardwareAddress = "any-hardware-address" // DHCP answers messages with the hardware address of another port: nodeagent/dhcp
	OpenResolver       = "open-resolver"        // DNS queries from outside of the VPC are answered: nodeagent/resolver
	ForwardPrivate     = "forward-private"      // names and addresses of a VPC are looked up in the host's resolvers: nodeagent/resolver
	ForeignPortToken   = "foreign-port-token"   // the metadata token of another port is accepted: nodeagent/metadata
	SkipToken          = "skip-token"           // the metadata service answers requests without a token: nodeagent/vpc
	KeepHopLimit       = "keep-hop-limit"       // metadata reaches clients behind a guest: nodeagent/metadata
	ReleaseAttachedNIC = "release-attached-nic" // the port of a NIC is released although the guest still has the NIC: shared/cloud
	ActiveWithoutAck   = "active-without-ack"   // a port is ACTIVE before its host has acknowledged its binding: controlplane/network, controlplane/sim
	SendStaleBinding   = "send-stale-binding"   // hosts do not get the new binding of a port: controlplane/network, controlplane/sim
	ReuseAddress       = "reuse-address"        // a released address is assigned again before it has rested: controlplane/network, controlplane/sim
	KeepMovedFloating  = "keep-moved-floating"  // a host keeps a floating IP that was moved to a port elsewhere: controlplane/network, controlplane/sim
	AnnounceTwice      = "announce-twice"       // a port's earlier binding replaces the later one, so that two hosts announce the port: nodeagent/vpc
	ActivateEarly      = "activate-early"       // ports are set up before their packet filter is installed: nodeagent/vpc
	ReachHosts         = "reach-hosts"          // guests reach hosts and members by NAT: nodeagent/vpc
	GatewayTwice       = "gateway-twice"        // a NAT gateway gets another host before its former host has withdrawn it: controlplane/network
	LoseReturn         = "lose-return"          // answers of backends to clients outside do not go back to the host with the floating IP: nodeagent/edge
	KeepCutOffAddress  = "keep-cut-off-address" // a host without contact to the control plane keeps answering for addresses that others take over: nodeagent/vpc
	KeepTranslated     = "keep-translated"      // connections of a removed floating IP continue: nodeagent/edge
	BalanceUnhealthy   = "balance-unhealthy"    // unhealthy backends of a service IP get connections: nodeagent/balancer
	AnyPeerSource      = "any-peer-source"      // packets with foreign sources pass a peering: nodeagent/peering
	TransitPeering     = "transit-peering"      // packets from a peering leave the VPC again: nodeagent/peering
	TrackTransit       = "track-transit"        // a host tracks connections of which it sees one direction only: nodeagent/peering
	ForeignHealth      = "foreign-health"       // a host reports the health of a backend on another host: controlplane/network
	AcceptPlainVXLAN   = "accept-plain-vxlan"   // a host with encryption accepts VXLAN packets that are not encrypted: nodeagent/ipsec
	RotateEarly        = "rotate-early"         // keys are rotated although a host has not received the former rotation: controlplane/network
)
