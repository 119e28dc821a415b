package e2e

import vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

// migrationDisk is a kind of disk of the guests that TestMigrationFaults moves.
type migrationDisk struct {
	// volume means that the disk is a volume that both hosts use. The content of other disks is copied.
	volume bool
	// create returns the specification of the disk of a new VM with this name.
	create func(vm string) *vmv1.DiskSpec
}

// localDisk is a disk that only one host has.
var localDisk = migrationDisk{create: func(string) *vmv1.DiskSpec {
	return &vmv1.DiskSpec{Id: "data", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}
}}
