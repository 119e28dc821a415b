# Replaces a Linux kernel in tests: a bzImage (Documentation/arch/x86/boot.rst) whose real-mode part prints on COM1 the
# command line and the length of the initrd that it got, and powers off.
	.code16
	.globl _start
_start:
	.org 0x1f1
	.byte 1                 # setup_sects
	.org 0x1f4
	.long 32                # syssize, in 16 bytes
	.org 0x1fe
	.word 0xaa55
	jmp setup               # 0x200
	.org 0x202
	.ascii "HdrS"
	.word 0x0206            # protocol version
	.org 0x211
	.byte 1                 # loadflags: loaded high
	.org 0x214
	.long 0x100000          # code32_start
	.org 0x218
image:	.long 0
size:	.long 0
	.org 0x228
cmdline: .long 0
	.long 0x37ffffff        # initrd_addr_max
	.org 0x238
	.long 2047              # cmdline_size
	.org 0x260
setup:	cld
	mov %ds,%ax             # the segment that offset 0 is at
	mov %ax,%es
	mov $hello,%si
	call print
	mov cmdline,%eax
	mov %eax,%esi
	shr $4,%eax
	mov %ax,%ds
	and $15,%si
	call print
	mov %es,%ax
	mov %ax,%ds
	mov $initrd,%si
	call print
	mov size,%ebx
	mov $8,%cx
1:	rol $4,%ebx
	mov %bl,%al
	and $15,%al
	add $'0',%al
	cmp $'9',%al
	jbe 2f
	add $39,%al
2:	call putc
	loop 1b
	mov $'\n',%al
	call putc
off:	mov $0x604,%dx
	mov $0x2000,%ax
	out %ax,%dx
	jmp off
print:	lodsb
	or %al,%al
	jz 4f
	call putc
	jmp print
4:	ret
putc:	push %dx
	push %ax
	mov $0x3fd,%dx
5:	in %dx,%al
	test $0x20,%al
	jz 5b
	pop %ax
	mov $0x3f8,%dx
	out %al,%dx
	pop %dx
	ret
hello:	.asciz "KERNEL ["
initrd:	.asciz "] INITRD "
	.org 1535
	.byte 0
