namespace pm::PM_ISA {}
