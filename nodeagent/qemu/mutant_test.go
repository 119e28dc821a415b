//go:build mutant

package qemu

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants removes one part of QEMU's confinement at a time, and checks that TestConfinement then fails.
func TestMutants(t *testing.T) {
	newLab(t) // skips the test where no QEMU can be started
	mutanttest.Notices(t, mutant.GuestAsRoot, TestConfinement, `0 0 0 0`)
	mutanttest.Notices(t, mutant.GuestUnsandboxed, TestConfinement, `Seccomp`)
	mutanttest.Notices(t, mutant.GuestOutsideCgroup, TestConfinement, `"0" is not greater than or equal to`)
	mutanttest.Notices(t, mutant.GuestKeepsCaps, TestConfinement, `CapBnd`)
	mutanttest.Notices(t, mutant.BootWithoutKeys, TestSecureBoot, `a program without a signature was started`)
	mutanttest.Notices(t, mutant.ShareTPMUser, TestTPMConfinement, `id of the TPM`)
	mutanttest.Notices(t, mutant.SkipNVRAMCopy, TestNVRAMIsCopied, `the NVRAM is not complete before the switchover`)
	mutanttest.Notices(t, mutant.MigrateLostTPM, TestTPMEnds, `the VM can be migrated without its TPM`)
	mutanttest.Notices(t, mutant.MigrateSuspended, TestMigrationOfSuspendedGuest, `the disks of a suspended guest are copied`)
	mutanttest.Notices(t, mutant.StartIncomplete, TestIncompleteFirmware, `the VM was started with a new TPM`)
	mutanttest.Notices(t, mutant.AcceptUnsynced, TestIncompleteFirmware, `a target without the state of the TPM was accepted`)
	mutanttest.Notices(t, mutant.ReuseLiveUID, TestUIDOfAProcessIsNotReused, `a process still runs under this uid`)
	mutanttest.Notices(t, mutant.DetachUnreleased, TestPlugNIC, `does not release`)
	mutanttest.Notices(t, mutant.DetachUnreleased, TestPlugDisk, `did not release`)
	mutanttest.Notices(t, mutant.CopyDecrypted, TestCopyOfEncryptedDisk, `copied in plain text`)
	mutanttest.Notices(t, mutant.CopyDisksInTurn, TestCopyOfOneInstant, `not of one instant`)
	mutanttest.Notices(t, mutant.TakeWithoutHold, TestGuestIsHeldWhileSnapshotsAreTaken, `the guest writes while`)
	mutanttest.Notices(t, mutant.ReuseFDSets, TestFDSetsAreNotReused, `two disks have one descriptor set`)
	mutanttest.Notices(t, mutant.KeepGuestOutput, TestGuestOutputIsCut, `kept without a limit`)
	mutanttest.Notices(t, mutant.HandOverRunning, TestHandOverOfRunningGuest, `a guest that was not stopped was handed over`)
	mutanttest.Notices(t, mutant.CopyNewWritesOnly, TestMigrate, `migrate_test.go`)
	mutanttest.Notices(t, mutant.KeepFrozen, TestCopyOfOneInstant, `the guest is thawed`)
}
