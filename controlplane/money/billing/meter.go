package billing

import (
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Terms are the prices and the length of an hour with which hours are billed.
type Terms struct {
	Prices Prices
	// Hour is the length of a billed hour, in milliseconds.
	Hour int64
}

// Meter is the record that counts the hours of one VM or volume. It is updated in the transaction that stores the
// resulting bills. So each hour is billed once, even if several transactions try to bill it at the same time.
type Meter struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	// VM is the ID of the VM, or the ID of the volume if Volume is true.
	VM     cloud.VMID
	Volume bool `cbor:",omitempty"`
	Name   string
	// Use holds the resources for which the VM is charged at present.
	Use Use
	// Until is the end of the last counted hour. The next hour to count begins then.
	Until cloud.Time
	// Peak is the price billed so far for the last counted hour: the price of the most expensive use in that hour.
	Peak int64
	// Reservation is the ID of the reservation from which the VM's first bill is paid. It is empty after that bill was
	// made.
	Reservation string
	// Bills is the number of bills that were made for the VM, and Last the position of the newest bill.
	Bills uint64
	Last  Place
}

// Place is the position of a bill among the bills of its VM. It is a part of the path of the bill's record, so it does
// not change when hours are added to the bill or paid.
type Place struct {
	From   cloud.Time
	Number uint64
}

// Bill is the record of what is owed for consecutive hours of one VM or volume at one price.
type Bill struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	// VM and Volume have the same values as in the Meter.
	VM     cloud.VMID
	Volume bool `cbor:",omitempty"`
	Name   string
	// Number is the sequence number of the bill among the bills of its VM.
	Number uint64
	// From is when the first unpaid hour began, and Step the length of each hour in milliseconds. Hours is the number
	// of unpaid hours.
	From  cloud.Time
	Step  int64
	Hours int64
	// Price is the price of each hour in units of credit, and Use the resources that it pays for.
	Price int64
	Use   Use
	// More is true if the hour was billed before at a lower price. This bill is then for the difference.
	More bool
	// Reservation is the ID of the reservation from which the first hour is charged, or empty if there is none.
	Reservation string
}

// Pass counts every hour that has begun by the time now, with the resources that the VM uses at present. It returns the
// bill for these hours, or nil if no hour has begun or the hours cost nothing.
func (m *Meter) Pass(now cloud.Time, t Terms) *Bill {
	if now < m.Until {
		return nil
	}
	hours := (now-m.Until)/t.Hour + 1
	price := t.Prices.Hour(m.Use)
	from, billed := m.Until, hours
	if m.isDeferred() && price > 0 {
		// The VM was off in the hour that has just ended, so that hour is not billed yet.
		from, billed = from-t.Hour, billed+1
	}
	if !mutant.On(mutant.ChargeHourTwice) {
		m.Until += hours * t.Hour
	}
	m.Peak = price
	return m.bill(from, billed, price, false, t)
}

// isDeferred reports whether the first bill of a VM has not been made yet and the VM is off. The first bill is made
// when the VM runs for the first time, or at the end of the hour. isDeferred returns false for a volume, whose first
// bill is made at its creation.
func (m *Meter) isDeferred() bool { return m.Reservation != "" && m.Use.VCPUs == 0 && !m.Volume }

// object returns the VM or volume of the meter for messages to users.
func (m *Meter) object() object { return object{m.Volume, m.Name, m.Project} }

// Change counts the hours up to now like Pass, and then stores u as the resources that the VM uses from now on. An hour
// costs as much as the most expensive use in it, so if the price rises, Change also bills the difference for the
// current hour.
func (m *Meter) Change(now cloud.Time, u Use, t Terms) []*Bill {
	var bills []*Bill
	add := func(b *Bill) {
		if b != nil {
			bills = append(bills, b)
		}
	}
	add(m.Pass(now, t))
	m.Use = u
	price, before := t.Prices.Hour(u), m.Peak
	if price > before && !m.isDeferred() && !mutant.On(mutant.ForgetShortRuns) {
		m.Peak = price
		add(m.bill(m.Until-t.Hour, 1, price-before, before > 0, t))
	}
	return bills
}

// bill returns a new bill for a number of consecutive hours. from is when the first one begins. It returns nil if the
// price is 0. The first bill of a VM takes the reservation of the meter.
func (m *Meter) bill(from cloud.Time, hours, price int64, more bool, t Terms) *Bill {
	if price == 0 {
		return nil
	}
	m.Bills++
	b := &Bill{
		Org: m.Org, Project: m.Project, VM: m.VM, Volume: m.Volume, Name: m.Name, Number: m.Bills, From: from, Step: t.Hour, Hours: hours, Price: price,
		Use: m.Use, More: more, Reservation: m.Reservation,
	}
	m.Reservation = ""
	return b
}

// Join adds the hours of a later bill of the VM to b and returns true. It returns false if these hours do not directly
// follow the hours of b, or differ in price or resources. Because bills are joined, even months of unpaid hours of one
// VM need only a few records.
func (b *Bill) Join(next *Bill) bool {
	if b.More || next.More || next.Reservation != "" || b.Price != next.Price || b.Use != next.Use || b.Step != next.Step ||
		b.From+b.Hours*b.Step != next.From {
		return false
	}
	b.Hours += next.Hours
	return true
}

// PayOne removes the first hour from a bill, after it has been charged.
func (b *Bill) PayOne() {
	b.From += b.Step
	b.Hours--
	b.Reservation = ""
}

// Total returns the amount owed for all hours of the bill. If it does not fit an int64, Total returns the largest
// int64.
func (b *Bill) Total() int64 {
	if b.Hours > 0 && b.Price > math.MaxInt64/b.Hours {
		return math.MaxInt64
	}
	return b.Price * b.Hours
}

// Says returns the text that describes the charge for the first hour of the bill to the tenant.
func (b *Bill) Says() string {
	which := "hour"
	if b.More {
		which = "rest of the hour"
	}
	return fmt.Sprintf("%s, %s from %s: %s", object{b.Volume, b.Name, b.Project}, which, time.UnixMilli(b.From).UTC().Format(time.RFC3339), b.Use)
}

// ID returns a UUID for an object that belongs to the first hour of the bill. The parameter named what says which
// object, for example the transaction "charge". A retry, also on another member, gets the same UUID.
func (b *Bill) ID(what string) string {
	return idOf(b.VM, fmt.Sprintf("%d/%d/%s", b.From, b.Number, what))
}

// idOf returns a UUID that is derived from a VM's ID and a text. Equal arguments give the same UUID.
func idOf(vm cloud.VMID, what string) string {
	return uuid.NewSHA1(uuid.NameSpaceOID, []byte("trivet/billing/"+string(vm)+"/"+what)).String()
}
