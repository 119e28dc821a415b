package billing

import (
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Terms are the parameters of counting.
type Terms struct {
	Prices Prices
	// Hour is the billing interval, in milliseconds.
	Hour int64
}

// Meter counts the hours of one VM. It is updated in the transaction that stores the resulting bills, so that each hour
// is billed once, even if several transactions race to bill it.
type Meter struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	VM      cloud.VMID
	Name    string
	// Use holds the resources that are billed since the last change.
	Use Use
	// Until is the end of the last counted hour, and the beginning of the next one.
	Until cloud.Time
	// Peak is the price billed for the last counted hour: that of the most expensive use in it.
	Peak int64
	// Reservation is the ID of the reservation for the first bill. It is empty once that bill exists.
	Reservation string
	// Bills is the number of bills. Last locates the record of the last one.
	Bills uint64
	Last  Place
}

// Place locates a bill's record among those of its VM. It does not change when the bill grows or is partly paid.
type Place struct {
	From   cloud.Time
	Number uint64
}

// Bill holds what is owed for consecutive hours of one VM at one price.
type Bill struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	VM      cloud.VMID
	Name    string
	// Number is the sequence number of the bill among the meter's bills.
	Number uint64
	// From is when the first unpaid hour began. Step is the length of each hour, in milliseconds.
	From  cloud.Time
	Step  int64
	Hours int64
	// Price is the price of each hour, for Use.
	Price int64
	Use   Use
	// More is set if the hour was billed before at a lower price, and this bill is for the difference.
	More bool
	// Reservation, if set, is the ID of a reservation for the first of the hours.
	Reservation string
}

// Pass counts every hour that has begun by now, at the current use. It returns nil if no hour has begun, or if the
// hours cost nothing.
func (m *Meter) Pass(now cloud.Time, t Terms) *Bill {
	if now < m.Until {
		return nil
	}
	hours := (now-m.Until)/t.Hour + 1
	price := t.Prices.Hour(m.Use)
	from, billed := m.Until, hours
	if m.isDeferred() && price > 0 {
		// The VM did not run in the hour that just ended, so that hour was not billed yet.
		from, billed = from-t.Hour, billed+1
	}
	if !mutant.On(mutant.ChargeHourTwice) {
		m.Until += hours * t.Hour
	}
	m.Peak = price
	return m.bill(from, billed, price, false, t)
}

// isDeferred reports whether the first bill is deferred: nothing is billed yet, and the VM is off. The bill is made
// when the VM runs, or at the end of the hour, and uses the reservation.
func (m *Meter) isDeferred() bool { return m.Reservation != "" && m.Use.VCPUs == 0 }

// Change counts the hours up to now, and sets the use from now on. An hour costs its most expensive use, so if the
// price rises, the difference is billed at once.
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

// bill returns a new bill, or nil if the price is 0. The first bill takes over the meter's reservation.
func (m *Meter) bill(from cloud.Time, hours, price int64, more bool, t Terms) *Bill {
	if price == 0 {
		return nil
	}
	m.Bills++
	b := &Bill{
		Org: m.Org, Project: m.Project, VM: m.VM, Name: m.Name, Number: m.Bills, From: from, Step: t.Hour, Hours: hours, Price: price,
		Use: m.Use, More: more, Reservation: m.Reservation,
	}
	m.Reservation = ""
	return b
}

// Join merges into b a bill for the directly following hours at the same price, and reports whether it could. Merging
// keeps even months of debt of one VM in a few records.
func (b *Bill) Join(next *Bill) bool {
	if b.More || next.More || next.Reservation != "" || b.Price != next.Price || b.Use != next.Use || b.Step != next.Step ||
		b.From+b.Hours*b.Step != next.From {
		return false
	}
	b.Hours += next.Hours
	return true
}

// PayOne removes the first hour from a bill.
func (b *Bill) PayOne() {
	b.From += b.Step
	b.Hours--
	b.Reservation = ""
}

// Total returns the amount owed, capped at the largest int64.
func (b *Bill) Total() int64 {
	if b.Hours > 0 && b.Price > math.MaxInt64/b.Hours {
		return math.MaxInt64
	}
	return b.Price * b.Hours
}

// Says returns the description, shown to the tenant, of the charge for the first of the hours.
func (b *Bill) Says() string {
	which := "hour"
	if b.More {
		which = "rest of the hour"
	}
	return fmt.Sprintf("VM %s, %s from %s: %s", b.Name, which, time.UnixMilli(b.From).UTC().Format(time.RFC3339), b.Use)
}

// ID returns a deterministic ID for an object that belongs to the first of the hours, so that retries and other members
// use the same ID.
func (b *Bill) ID(what string) string {
	return idOf(b.VM, fmt.Sprintf("%d/%d/%s", b.From, b.Number, what))
}

// idOf returns a deterministic UUID derived from a VM's ID and a text.
func idOf(vm cloud.VMID, what string) string {
	return uuid.NewSHA1(uuid.NameSpaceOID, []byte("trivet/billing/"+string(vm)+"/"+what)).String()
}
