package qemu

import (
	"fmt"
	"os"
)

// cdromSlot is the slot of the CD-ROM drive, by bus. It comes after the slots of the disks. On the SATA bus it is the
// last port, so a VM with a CD-ROM drive cannot have a disk there.
var cdromSlot = map[Bus]int{SCSI: 16, SATA: 5}

func (s Spec) validateCDROM() error {
	switch {
	case s.CDROM == "":
		return nil
	case cdromSlot[s.CDROM] == 0:
		return invalid("the bus %q has no CD-ROM drive", s.CDROM)
	}
	for _, d := range s.Disks {
		if d.Bus == s.CDROM && d.Slot == cdromSlot[s.CDROM] {
			return invalid("disk %s: with a CD-ROM drive, the bus %s has room for only %d disks", d.ID, d.Bus, cdromSlot[s.CDROM])
		}
	}
	return nil
}

// cdrom adds the CD-ROM drive. The parameter fd is the descriptor of its image. The firmware tries the drive after all
// disks, so that an image with an installer boots only while the disks are empty.
func (a *args) cdrom(s Spec, fd int) {
	a.fdset(fd, "cdrom")
	a.json("-blockdev", object{"driver": "file", "node-name": "cdrom-file", "filename": fdsetPath(fd), "read-only": true,
		"auto-read-only": false})
	a.json("-blockdev", object{"driver": "raw", "node-name": "cdrom", "file": "cdrom-file", "read-only": true, "auto-read-only": false})
	o := object{"id": "cdrom", "drive": "cdrom", "bootindex": len(s.Disks) + 1, "rerror": "stop", "werror": "stop"}
	switch s.CDROM {
	case SCSI:
		o["driver"], o["bus"], o["channel"], o["scsi-id"], o["lun"] = "scsi-cd", scsiID+".0", 0, cdromSlot[SCSI], 0
	case SATA:
		o["driver"], o["bus"], o["unit"] = "ide-cd", fmt.Sprintf("ide.%d", cdromSlot[SATA]), 0
	}
	a.json("-device", o)
}

// cdromFile returns the file of the CD-ROM drive, or no file if s has no drive.
func (f Files) cdromFile(s Spec) ([]*os.File, error) {
	if s.CDROM == "" {
		return nil, nil
	}
	if err := checkOpenMode(f.CDROM, false); err != nil {
		return nil, fmt.Errorf("the image of the CD-ROM drive %w", err)
	}
	return []*os.File{f.CDROM}, nil
}
